"""How a run ends, as a value: `Outcome`, and `RunEnd`, which stores the first one.

Also converts errors of the operating system. The end of a run is decided in coordinator.py and server.py.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

from areal_like.errors import OperationError
from controller.coordinator.effects import EndStatus


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `error`: the exception that its command raises, if any."""

    status: EndStatus
    reason: str
    error: Exception | None = None

    @staticmethod
    def of(error: BaseException) -> Outcome:
        """Make the outcome of an error."""
        cause = as_operation(error)
        return Outcome("failed", str(cause), cause)


class RunEnd:
    """The end of a run, decided once. `over` wakes the server; the session reads the outcome afterwards."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.outcome: Outcome | None = None
        self.is_hurried = False
        """The user requested an immediate end, without waiting for processes."""
        self.death: OperationError | None = None
        """The last process that was lost and not restarted."""

    def decide(self, outcome: Outcome) -> None:
        """End the run; the first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.over.set()


class StoppedAtOnce(OperationError):
    """Raised if the user requested the end twice."""

    def __init__(self) -> None:
        super().__init__("stopped at once; continue with areal-like resume")


def as_operation(error: BaseException) -> Exception:
    """Convert an error of the operating system (disk full, too many files) to an OperationError, which prints no
    traceback.
    """
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = " -> free some disk space (areal-like doctor shows the free space), then run areal-like resume"
        return OperationError(f"{where}{error.strerror or error}{remedy}")
    assert isinstance(error, Exception)
    return error
