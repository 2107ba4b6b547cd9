"""Exceptions for operations, and `UserError` for a user's mistake.

`UserError` is a ValueError: the user has configured or typed something that cannot work. It is shown as one sentence
without a traceback. `OperationError` is everything that can go wrong while a correct configuration runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

MAX_LINE_CHARS = 200


class UserError(ValueError):
    """A mistake in the user's input: says what is wrong, where, and how to fix it."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text} -> {remedy}" if remedy else text)


class OperationError(Exception):
    """Base of all errors at run time that are not the user's mistake."""


class RunFailed(OperationError):
    """A run that the Python API started or opened has failed. `run` names it."""

    def __init__(self, run: str, what: str) -> None:
        self.run = run
        super().__init__(what)


class WireError(OperationError):
    """A message that is malformed, truncated, oversized or of an unknown kind."""


class ChannelError(OperationError):
    """A peer cannot be reached, or refused the connection."""


class DeadlineExceeded(OperationError):
    """A named wait passed its deadline. `wait` is its name, `owner` the process that should have ended it."""

    def __init__(self, wait: str, owner: str, deadline_s: float) -> None:
        self.wait, self.owner, self.deadline_s = wait, owner, deadline_s
        super().__init__(f"waited {deadline_s:g} s for {wait} (expected from {owner})")


class WeightError(OperationError):
    """A weight payload is missing, incomplete, corrupt or does not fit the model."""


class WeightsDamaged(WeightError):
    """Bytes of a published version are damaged or missing, or a delta before it is missing. It can be loaded if it is
    written again."""


class TransferBroken(WeightError):
    """A weight transfer through a process group failed or passed its deadline; the version may be transferred in
    another way."""


class EngineError(OperationError):
    """The generation engine failed."""


class PolicyDiverged(EngineError):
    """The weights of policy `version` are not finite, because training diverged."""

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
    """First line of the message of a library's exception, short enough to be part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_LINE_CHARS]


@contextlib.contextmanager
def add_file_name(path: Path) -> Iterator[None]:
    """Add this file's name to OSErrors raised in the body: those of a write to an open file have no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
