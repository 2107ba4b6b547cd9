"""A process of this machine by its id.

Owns: the start of an interpreter, signals to a process and its session, its processor time and memory. Refuses: which
processes are started and how they ended.
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
    """`python -P <argv>` in a session of its own, its output appended to `log_path`. Raises OSError."""
    with log_path.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # never the current folder first: a user's trainer.py must not become our trainer
            *argv,
            stdin=stdin,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def is_stopped(pid: int | None) -> bool:
    """The process is suspended (SIGSTOP, a debugger): it does nothing until somebody continues it."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def exit_status(pid: int) -> int | None:
    """How a process ended whose parent has not asked yet, negative for a signal; None where nothing tells."""
    fields = _stat(pid)
    if not fields or fields[0] not in ("Z", "X"):
        return None
    try:
        return os.waitstatus_to_exitcode(int(fields[-1]))
    except ValueError:
        return None


def _stat(pid: int | None) -> list[str]:
    """/proc/<pid>/stat from the state on; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before it may hold anything


class LocalPid(ABC):
    """A process on this machine that leads a session of its own."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    @abstractmethod
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""

    @property
    def cpu_s(self) -> float | None:
        """Processor time it has spent, and what it started."""
        return cpu_seconds([self.pid]).get(self.pid)

    @property
    def rss_mb(self) -> float | None:
        """Its resident memory in MiB, without its children."""
        return rss_mb(self.pid)

    @property
    def awaited(self) -> str:
        """Nothing: it was started at once."""
        return ""

    def terminate(self) -> None:
        """SIGTERM to it alone."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it, if it lives, and to whatever it started in its own session."""
        if self.returncode is None:  # just forked, it leads no session yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
