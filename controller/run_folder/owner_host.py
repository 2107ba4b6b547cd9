"""Determines from outside whether a run is in progress, and if not, how it ended.

The details of a run are in controller/runs/status.py.

running   its controller runs on this machine: same host, same boot, same process (pid and start time)
crashed   the state file says running, it was written here, and that process has exited
foreign   the state file says running and was written on another machine, or is damaged: the state is unknown here
finished, stopped, failed   from the state file
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from areal_like.errors import UserError
from areal_like.process import boot_id, is_same_process
from controller.run_folder.formatting import ago
from controller.run_folder.run_folder import DamagedState, RunFolder

Kind = Literal["running", "finished", "stopped", "failed", "crashed", "foreign"]
_ENDED = ("finished", "stopped", "failed")
FRESH_S = 30.0
"""A status file younger than this is being updated by a running controller."""


@dataclass(frozen=True)
class Whereabouts:
    """State of a run. `words`: a sentence for users; `state`: content of the state file."""

    kind: Kind
    words: str
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether the controller runs on this machine."""
        return self.kind == "running"

    @property
    def pid(self) -> int | None:
        """The controller's process id, if it is in the state file."""
        return _pid(self.state)


def whereabouts(folder: RunFolder, *, now_s: float | None = None) -> Whereabouts:
    """Determine the state of one run. Raises UserError if its state file is damaged or of a newer version."""
    state = folder.read_state()
    now_s = time.time() if now_s is None else now_s
    status = state.get("status")
    if status in _ENDED:
        when_s = _seconds(state.get("ended_s", state.get("updated_s")))
        when = f" {ago(now_s - when_s)}" if when_s is not None else ""
        reason = str(state.get("reason") or "")
        return Whereabouts(cast(Kind, status), f"{status}{when}" + (f": {reason}" if reason else ""), state)
    word_s = _last_word_s(folder, state)
    received = (
        f"the last message of the controller was {ago(now_s - word_s)}"
        if word_s is not None
        else "the controller sent no message"
    )
    host, here = str(state.get("host") or ""), socket.gethostname()
    if host and host != here:
        return Whereabouts("foreign", f"runs, or ran, on {host}, not on this machine ({here}): {received}", state)
    if not _is_same_boot(state):
        if word_s is not None and 0 <= now_s - word_s < FRESH_S:
            return Whereabouts("foreign", f"runs on another machine that is also called {here}: {received}", state)
        return Whereabouts("crashed", f"crashed: this machine has been restarted since; {received}", state)
    pid = _pid(state)
    if pid is not None and is_same_process(pid, _seconds(state.get("controller_started_s")) or 0.0):
        return Whereabouts("running", f"running (process {pid})", state)
    return Whereabouts(
        "crashed", f"crashed: its controller (process {pid or '?'}) is no longer running; {received}", state
    )


def whereabouts_if_known(folder: RunFolder) -> Whereabouts:
    """Same, but a damaged state file is not an error: the state is then unknown.

    Raises UserError if the state file is of a newer version.
    """
    try:
        return whereabouts(folder)
    except DamagedState as error:
        return Whereabouts("foreign", f"it is not known whether the run is in progress: {error.what}")


def status_exit(kind: Kind) -> int:
    """Exit status for a run: 0 in progress or ended normally, 1 failed or crashed, 3 unknown."""
    return {"failed": 1, "crashed": 1, "foreign": 3}.get(kind, 0)


def refuse_if_elsewhere(folder: RunFolder) -> None:
    """Raise UserError if another machine has just written to this run: two controllers would corrupt its ledger."""
    found = whereabouts(folder)
    word_s = _last_word_s(folder, found.state)
    if found.kind == "foreign" and word_s is not None and time.time() - word_s < FRESH_S:
        raise UserError(found.words, where=str(folder.root), remedy="stop the run on the other machine first")


def _is_same_boot(state: Mapping[str, Any]) -> bool:
    then = str(state.get("boot_id") or "")
    now = boot_id()
    return not then or not now or then == now  # without a boot id only the process is compared


def _last_word_s(folder: RunFolder, state: Mapping[str, Any]) -> float | None:
    """Wall-clock time of the last update: from the status file, else from the state file."""
    found = [_seconds(state.get("updated_s"))]
    try:
        status = json.loads(folder.status.read_text())
        found.append(_seconds(status.get("time_s")))
    except (OSError, ValueError, AttributeError):
        pass  # a run of an older version, or one that exited within its first second
    return max((value for value in found if value is not None), default=None)


def _pid(state: Mapping[str, Any]) -> int | None:
    value = state.get("controller_pid")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
