"""Settings that name a metric of the evaluations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.settings import Settings

Direction = Literal["max", "min"]
"""What is better of a metric: more or less."""


class BestSettings(Settings):
    """A metric of the evaluations."""

    metric: str = Field("accuracy", min_length=1)
    """`accuracy`, `pass_at_K`, or one of a set, such as `accuracy/NAME`."""
    mode: Direction = "max"
    """`max`: more is better; `min`: less."""
