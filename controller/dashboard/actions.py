"""Actions of the pages on a run: checkpoint, stop, drain, add. Each executes the command of the same name.

Selects commands and arguments, runs one at a time per run and returns the output. Access is checked in access.py; the
commands are in runs/stop.py, runs/crew.py and runs/checkpoint.py.

A command is a separate process with the same output and permissions as on the command line. It continues if the browser
disconnects. When the server ends, waiting commands are ended, but not what they requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.errors import UserError
from controller.report.overview import text
from controller.run_folder.owner_host import Whereabouts
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.runs.crew import goes_on

ACTIONS = ("checkpoint", "stop", "drain", "add")
COMMAND = (sys.executable, "-P", "-m", "controller")
MAX_OUTPUT_BYTES = 64 << 10
_WORKER = re.compile(r"rollout-\d{1,6}")


class Busy(UserError):
    """Raised if another action on the same run has not ended yet."""


@dataclass
class Actions:
    """Running commands, by run."""

    command: Sequence[str] = COMMAND
    _running: dict[str, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)

    async def perform(self, folder: RunFolder, action: str, worker: str = "") -> dict[str, Any]:
        """Run one command to its end; return `is_done` from its exit status, and its output. Raises UserError, Busy."""
        words = words_of(folder, action, worker)
        key = str(folder.root)
        if key in self._running:
            raise Busy(
                "another action on this run is still in progress",
                where=folder.name,
                remedy="wait until it has finished",
            )
        task = asyncio.create_task(self._run(words), name=f"dashboard {action}")
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the commands that are still waiting."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, words: Sequence[str]) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *self.command, *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=MAX_OUTPUT_BYTES,
        )  # fmt: skip
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        lines = output[-MAX_OUTPUT_BYTES:].decode(errors="replace").splitlines()
        return {"is_done": process.returncode == 0, "lines": [text(line) for line in lines if line.strip()]}


def refusals(where: Whereabouts | None) -> dict[str, str]:
    """The reason for each action that its command would refuse, by action. None: the state of the run is not known."""
    if where is None or not goes_on(where):
        return dict.fromkeys(ACTIONS, "the run is not in progress")
    found: dict[str, str] = {}
    if is_from_files(where.state):
        found |= dict.fromkeys(("checkpoint", "drain", "add"), "the run trains from files and accepts no requests")
    if not where.is_running:  # the other commands reach its controller through the run's folder
        host = text(where.state.get("host") or "the other machine", 120)
        found["stop"] = f"the run can only be stopped on {host}; log in there and use areal-like stop"
    return found


def words_of(folder: RunFolder, action: str, worker: str) -> list[str]:
    """The command's arguments. The folder is absolute, so it cannot be an option. Raises UserError."""
    if action not in ACTIONS:
        raise UserError(
            f"there is no action {text(action, 40)!r}", where=folder.name, remedy=f"use one of {', '.join(ACTIONS)}"
        )
    if action != "drain":
        return [action, str(folder.root)]
    if not _WORKER.fullmatch(worker):
        raise UserError(
            "the request does not name a rollout worker",
            where="drain",
            remedy="choose a worker: rollout-0, rollout-1, ...",
        )
    return [action, str(folder.root), worker]
