"""Settings of the reward service. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from areal_like.config import Settings

BUILT_IN_SCORERS = ("math", "running_sum", "format")
"""Kinds of scorers beside `module:function`."""


class ScorerSettings(Settings):
    """One scorer of the weighted sum."""

    kind: str
    """`math`, `running_sum`, `format`, or `module:function` of your own."""
    weight: float = 1.0
    """Factor of this component in the reward."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the scorer."""


class RewardSettings(Settings):
    """The reward service: a pool of killable processes that turn answers into verdicts."""

    scorers: tuple[ScorerSettings, ...] = Field((ScorerSettings(kind="math"),), min_length=1)
    """Summed by weight; component `correct` (0 or 1), where a scorer gives it, is what evaluation averages."""
    num_workers: int = Field(1, gt=0)
    """Scoring processes."""
    timeout_s: float = Field(10.0, gt=0)
    """Past this a scoring process is killed and replaced, and the verdict is `timed_out`."""
    retries: int = Field(1, ge=0)
    """Further attempts after `timed_out` or `crashed`."""
    on_failure: Literal["drop_sample", "drop_group"] | float = "drop_sample"
    """What a non-score does to its group after all attempts; a number is used as the reward."""
    max_queue: int = Field(4096, gt=0)
    """Requests waiting in the service; more are held back by the client."""
    num_spares: int = Field(1, ge=0)
    """Warm scoring processes beside `num_workers`, which take the place of a killed one at once."""
    max_memory_mb: int = Field(4096, gt=0)
    """Resident memory of a scoring process and all below it; past this it is killed and replaced."""
    recycle_after: int = Field(20_000, gt=0)
    """A scoring process is replaced after this many answers."""
    max_restarts: int = Field(5, ge=0)
    """How often a dead service is started again."""
