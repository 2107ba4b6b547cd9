"""A process of this machine by its id: starting an interpreter, signals to a process and its session, processor time
and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.launch.processor import cpu_seconds, rss_mb


async def start_python(
    argv: Sequence[str], environment: Mapping[str, str], log_path: Path, *, stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    """Start `python -P <argv>` in a new session, with its output appended to `log_path`. Raises OSError."""
    with log_path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # the current folder is never first on the path: a user's trainer.py must not replace this program's trainer
            "-P",
            *argv,
            stdin=stdin,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def is_stopped(pid: int | None) -> bool:
    """Return whether the process is suspended (SIGSTOP, a debugger)."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def exit_status(pid: int) -> int | None:
    """Exit code of a process that its parent has not waited for, negative for a signal; None if unknown."""
    fields = _stat(pid)
    if not fields or fields[0] not in ("Z", "X"):
        return None
    try:
        return os.waitstatus_to_exitcode(int(fields[-1]))
    except ValueError:
        return None


def _stat(pid: int | None) -> list[str]:
    """/proc/<pid>/stat from the state on; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may contain any characters


class LocalPid(ABC):
    """A process on this machine that is the leader of its session."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""

    @property
    def cpu_s(self) -> float | None:
        """Processor time of it and its descendants."""
        return cpu_seconds([self.pid]).get(self.pid)

    @property
    def rss_mb(self) -> float | None:
        """Its resident memory in MiB, without its children."""
        return rss_mb(self.pid)

    @property
    def awaited(self) -> str:
        """Empty: it was started immediately."""
        return ""

    def terminate(self) -> None:
        """Send SIGTERM only to it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it, if it is alive, and to all processes in its session."""
        if self.returncode is None:  # just forked, it is not the leader of a session yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
