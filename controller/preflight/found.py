"""Result of the checks before a start. The checks are in preflight.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from areal_like.errors import UserError
from controller.config.problems import Problem
from controller.data.job_rows import Tables
from controller.data.table import Table
from controller.preflight.train_stages import CleanedTrain

Purpose = Literal["train", "sft", "eval", "validate", "probe"]


@dataclass
class Preflight:
    """Result of the checks. `absent` contains problems that only apply to this machine."""

    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    train: Table | None = None
    eval: Table | None = None
    cleaned: CleanedTrain | None = None
    """The rows of data.train after its stages; `train` reads them, so keep it as long as the table."""
    model: dict[str, Any] | None = None
    """config.json of model.path, where it could be read."""
    seats: list[str] = field(default_factory=list)
    """Placement of the processes on the cluster, a line per node."""
    device_bytes: float | None = None
    """Memory of the GPU that the config names, else of this machine's largest GPU; None: not known."""

    @property
    def tables(self) -> Tables:
        """The tables for the job, so that large data sets are read only once."""
        return Tables(self.train, self.eval)


def as_problem(key: str, error: UserError) -> Problem:
    """Convert the error to a problem of this key, without repeating the key in its text."""
    what = error.what if error.where.startswith(key) or not error.where else f"{error.where}: {error.what}"
    if error.where.startswith(f"{key}: "):
        what = f"{error.where.removeprefix(f'{key}: ')}: {error.what}"
    return Problem((key,), what, error.remedy)
