"""What a look before a start has found. Pure data.

Owns: `Preflight`, the purposes of a look, a mistake as a problem. Refuses: looking (preflight.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from areal_like.errors import UserError
from controller.config.problems import Problem
from controller.data.job_rows import Tables
from controller.data.table import Table

Purpose = Literal["train", "sft", "eval", "validate", "probe"]


@dataclass
class Preflight:
    """What was found. `absent` is what only this machine lacks."""

    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    train: Table | None = None
    eval: Table | None = None
    model: dict[str, Any] | None = None
    """config.json of model.path, where it could be read."""
    seats: list[str] = field(default_factory=list)
    """Who would sit where on the cluster, a line per node."""
    device_bytes: float | None = None
    """Memory of the GPU that the config names, else of this machine's largest; None: not known."""

    @property
    def tables(self) -> Tables:
        """For the job: reading large data sets takes long, and once is enough."""
        return Tables(self.train, self.eval)


def as_problem(key: str, error: UserError) -> Problem:
    """The mistake under this key, which its words need not repeat."""
    what = error.what if error.where.startswith(key) or not error.where else f"{error.where}: {error.what}"
    if error.where.startswith(f"{key}: "):
        what = f"{error.where.removeprefix(f'{key}: ')}: {error.what}"
    return Problem((key,), what, error.remedy)
