"""How a run ends, as a value.

Owns: `Outcome`, `RunEnd` that holds the first one, the user's second signal as an error, refusals of the operating
system in our words. Refuses: deciding that a run is over (coordinator.py, server.py).
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass

from areal_like.errors import OperationError
from controller.coordinator.effects import EndStatus


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `error`: what its command raises in the end, if anything."""

    status: EndStatus
    reason: str
    error: Exception | None = None

    @staticmethod
    def of(error: BaseException) -> Outcome:
        """The end by an error."""
        cause = as_operation(error)
        return Outcome("failed", str(cause), cause)


class RunEnd:
    """The end of a run, decided once. `over` wakes the server; the session reads the rest afterwards."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.outcome: Outcome | None = None
        self.is_hurried = False
        """The user wants it over now: no wait for anybody."""
        self.death: OperationError | None = None
        """The last process that is lost and not restarted."""

    def decide(self, outcome: Outcome) -> None:
        """End the run; the first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.over.set()


class StoppedAtOnce(OperationError):
    """The user asked twice."""

    def __init__(self) -> None:
        super().__init__("stopped at once; continue with areal-like resume")


def as_operation(error: BaseException) -> Exception:
    """A refusal of the operating system (disk full, too many files) as an error of ours: words, no traceback."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = " -> make room there (areal-like doctor shows what is free), then areal-like resume"
        return OperationError(f"{where}{error.strerror or error}{remedy}")
    assert isinstance(error, Exception)
    return error
