"""The one error tree for operations, and the shape of a user's mistake.

Owns: exception types, `first_line`. Refuses: deciding what happens next (that is the catcher's policy).
`UserError` is a ValueError: somebody typed something that cannot work; it is shown as one sentence without a traceback.
`OperationError` is everything that can go wrong while a correct configuration runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

MAX_LINE_CHARS = 200


class UserError(ValueError):
    """A mistake in what the user gave us: says what is wrong, where, and how to fix it."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} -> {remedy}" if remedy else text)


class OperationError(Exception):
    """Root of everything that goes wrong at run time without being the user's mistake."""


class RunFailed(OperationError):
    """A run that the Python API started or opened has failed. `run` names it."""

    def __init__(self, run: str, what: str) -> None:
        self.run = run
        super().__init__(what)


class WireError(OperationError):
    """A message that is malformed, truncated, oversized or of an unknown kind."""


class ChannelError(OperationError):
    """A peer cannot be reached, or refused us."""


class DeadlineExceeded(OperationError):
    """A named wait ran past its deadline. `wait` names it, `owner` says who should have ended it."""

    def __init__(self, wait: str, owner: str, deadline_s: float) -> None:
        self.wait, self.owner, self.deadline_s = wait, owner, deadline_s
        super().__init__(f"waited {deadline_s:g} s for {wait} (expected from {owner})")


class WeightError(OperationError):
    """A weight payload is missing, incomplete, corrupt or does not fit the model."""


class WeightsDamaged(WeightError):
    """Bytes of a published version are damaged, missing or do not lead to it: written again, it can be had."""


class TransferBroken(WeightError):
    """A process group that carried weights broke off, or its deadline passed: the version may come another way."""


class EngineError(OperationError):
    """The generation engine failed."""


class PolicyDiverged(EngineError):
    """The numbers of policy `version` have overflowed: training brought it there, and one sentence says it all."""

    def __init__(self, version: int, what: str) -> None:
        self.version = version
        super().__init__(
            f"the policy has diverged at version {version} ({what}) -> lower trainer.optimizer.lr or "
            "trainer.optimizer.max_grad_norm, and resume from a checkpoint before it"
        )


class LedgerError(OperationError):
    """The run's ledger is damaged or refuses a write."""


class ProcessDied(OperationError):
    """A process of the run ended when it should not have. `tail` is the end of its own log."""

    def __init__(self, name: str, returncode: int, tail: str) -> None:
        self.name, self.returncode, self.tail = name, returncode, tail
        super().__init__(f"process {name} ended with status {returncode}")


def first_line(error: BaseException) -> str:
    """What an error of somebody else's library says, short enough to stand inside a sentence of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_LINE_CHARS]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system in the body name this file: those of a write to an open one name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
