"""A process of this machine by its id.

Owns: signals to it and its session, its processor time. Refuses: how it was started and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod

import psutil


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
        """Processor time it has spent."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)

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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
