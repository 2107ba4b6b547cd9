"""The folder of one run: its paths, creation, status file and lock. Only its owner can read it."""

from __future__ import annotations

import difflib
import json
import socket
import stat
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from areal_like.encryption.texts import PREFIX, Texts
from areal_like.errors import UserError
from areal_like.process import boot_id, is_same_process, user_umask
from controller.run_folder.spare_file import replace_with_reserve

FORMAT = 1
"""Version of the folder's layout; newer ones are rejected."""
BEST_FOLDER = "best"
"""Folder of the checkpoint with the best evaluation."""

FOLDER_FILE = "AREAL_LIKE_FOLDER_FILE"
"""Environment variable with a file into which a command that starts or resumes a run writes the path of its folder."""

Status = Literal["running", "finished", "stopped", "failed"]


NO_LEDGER = (
    "the run has no ledger: either nothing has been generated yet, or it is an offline run, which generates no samples"
)
NAME_REMEDY = "use letters, digits, - and _, and begin with a letter or digit"
MAX_NAME_BYTES = 200
"""Maximum length of a name. File systems allow 255 characters, and suffixes such as -eval or -2 are appended."""
_STATE_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    "run_id": str, "status": str, "command": str, "objective": str, "host": str, "boot_id": str, "reason": str,
    "started_in": str,
    "data": dict, "cleaning": dict, "versions": dict, "python": str, "platform": str, "controller_pid": int,
    "controller_started_s": (int, float), "created_s": (int, float), "updated_s": (int, float), "ended_s": (int, float),
}  # fmt: skip


def is_run_name(name: str) -> bool:
    """Return whether the text is a valid name of a run: a valid folder name that is not an option (no leading dash)."""
    is_odd = name != name.strip() or not name.isprintable() or name.startswith((".", "-")) or "/" in name
    return bool(name) and not is_odd and len(name.encode()) <= MAX_NAME_BYTES


def misfits(state: Mapping[str, Any]) -> list[str]:
    """Keys of a status file whose values have an unexpected type."""
    return [
        key
        for key, kind in _STATE_SHAPES.items()
        if state.get(key) is not None and (not isinstance(state[key], kind) or isinstance(state[key], bool))
    ]


def is_resumable(state: Mapping[str, Any]) -> bool:
    """Return whether `areal-like resume` can continue this run, by its status file: a run of `train`, or a run from
    files.
    """
    return state.get("command", "train") == "train" or is_from_files(state)


def is_from_files(state: Mapping[str, Any]) -> bool:
    """Return whether the run trains from files (docs/offline.md), by its status file: no rollouts, no ledger."""
    return "objective" in state


class DamagedState(UserError):
    """Raised if state.json is missing or cannot be read; ledger, metrics and logs may be intact."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    root: Path

    @property
    def name(self) -> str:
        """The run's name, including a suffix."""
        return self.root.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def ledger(self) -> Path:
        """SQLite file; token payloads are stored in `segments/` next to it."""
        return self.root / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        """One JSON object per line: steps, evaluations, events."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Summary printed at the end of the run."""
        return self.root / "summary.json"

    @property
    def logs(self) -> Path:
        """One log and one trace file per process."""
        return self.root / "logs"

    @property
    def processes(self) -> Path:
        """Specs with which processes were started."""
        return self.root / "processes"

    @property
    def requests(self) -> Path:
        """Requests of other processes to the running controller; see control_requests.py."""
        return self.root / "requests"

    @property
    def keys(self) -> Path:
        """Keys and join secrets of the run, and a folder with those of each process; readable by the owner only."""
        return self.root / "keys"

    @property
    def best(self) -> Path:
        """The checkpoint with the best evaluation, where one is kept."""
        return self.root / BEST_FOLDER

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folders."""
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        """The final policy in Hugging Face format."""
        return self.root / "final"

    @property
    def state(self) -> Path:
        """State file: the controller's process, start time, and how the run ended."""
        return self.root / "state.json"

    @property
    def status(self) -> Path:
        """Status file: current activity of the run; see telemetry/status.py."""
        return self.root / "status.json"

    @staticmethod
    def create(runs_dir: Path, name: str) -> RunFolder:
        """Create `runs_dir/name`, or `name-2`, `name-3`, ... if it exists. Raises UserError if it cannot be written."""
        if not is_run_name(name):
            raise UserError(f"{name!r} is not a valid folder name", where="name", remedy=NAME_REMEDY)
        try:
            with user_umask():  # several users may share it, as far as each user's umask allows
                runs_dir.mkdir(parents=True, exist_ok=True)
            number = 1
            while True:
                root = runs_dir / (name if number == 1 else f"{name}-{number}")
                try:
                    root.mkdir(mode=0o700)
                    break
                except FileExistsError:
                    number += 1
            folder = RunFolder(root.resolve())
            for path in (folder.logs, folder.processes, folder.checkpoints):
                path.mkdir()
        except OSError as error:
            raise UserError(
                f"the run's folder cannot be created ({error.strerror})",
                where=f"runs_dir: {runs_dir}",
                remedy="make the parent folder writable, or choose a different one with runs_dir=/path/to/folder",
            ) from error
        return folder

    def make_private(self) -> int | None:
        """Remove the access of other users; return the previous mode. None: it was private, or its mode cannot be set.

        Folders of earlier versions are accessible to others.
        """
        mode = stat.S_IMODE(self.root.stat().st_mode)
        if not mode & 0o077:
            return None
        try:
            self.root.chmod(mode & 0o700)
        except PermissionError:  # a file system without modes, or another user's folder
            return None
        return mode

    @staticmethod
    def find(run: str | Path, runs_dir: Path = Path("runs")) -> RunFolder:
        """Find the folder of an existing run by its path or name. Raises UserError with similar names."""
        for candidate in (Path(run), runs_dir / str(run)):
            if (candidate / "state.json").is_file():
                folder = RunFolder(candidate.resolve())
                folder.read_state()
                return folder
        known = sorted(path.parent.name for path in runs_dir.glob("*/state.json"))
        near = difflib.get_close_matches(str(run), known, n=3) or known[-3:]
        raise UserError(
            "there is no run in this folder",
            where=str(run),
            remedy=f"known runs: {', '.join(near)}" if near else "start a run first",
        )

    def read_state(self) -> dict[str, Any]:
        """Read the status file, without values of an unexpected type.

        Raises DamagedState, and UserError if it is from a newer version.
        """
        try:
            state = json.loads(self.state.read_text())
            found = int(state["format"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedState(
                f"the run's status file is damaged ({error})", where=str(self.state), remedy="start a new run"
            ) from error
        if found > FORMAT:
            raise UserError(
                f"the run was created by a newer version of areal_like (folder layout {found}; this version supports "
                "layouts up to "
                f"{FORMAT})",
                where=str(self.root),
                remedy="update areal_like",
            )
        kept = {key: value for key, value in state.items() if key not in misfits(state)}
        if str(kept.get("reason", "")).startswith(PREFIX):
            kept["reason"] = Texts.to_show(self.root).opened("reason", kept["reason"])
        return kept

    def write_state(self, status: Status, **more: Any) -> None:
        """Replace the status file atomically, also on a full disk; existing keys are kept unless given.

        Raises UserError, OSError.
        """
        old = self.read_state() if self.state.is_file() else {"created_s": time.time()}
        old.pop("ended_s", None)
        me, now_s = psutil.Process(), time.time()
        state = {
            "run_id": uuid.uuid4().hex[:12],
            **old,
            "format": FORMAT,
            "status": status,
            "controller_pid": me.pid,
            "controller_started_s": me.create_time(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "updated_s": now_s,
            **({} if status == "running" else {"ended_s": now_s}),
            "reason": "",
            **more,
        }
        if state["reason"]:
            state["reason"] = Texts.to_write(self.root).sealed("reason", str(state["reason"]))
        replace_with_reserve(self.state, json.dumps(state, indent=1).encode())

    def refuse_if_running(self) -> None:
        """Raise UserError if the controller of this run is alive."""
        state = self.read_state()
        try:
            is_alive = is_same_process(int(state["controller_pid"]), float(state["controller_started_s"]))
        except (KeyError, ValueError):
            is_alive = False
        if is_alive and state.get("status") == "running":
            raise UserError(
                f"the run is still in progress (process {state['controller_pid']})",
                where=str(self.root),
                remedy="stop the run first, or start a new one",
            )
