"""Settings of the section early_stop: a run that ends when a metric gets no better."""

from __future__ import annotations

from pydantic import Field

from areal_like import limits
from areal_like.metric_settings import BestSettings


class EarlyStopSettings(BestSettings):
    """End the run when a metric of the evaluations has stopped getting better."""

    patience: int = Field(3, gt=0, le=limits.STEPS)
    """Evaluations in a row without a better value."""
    min_delta: float = Field(0.0, ge=0)
    """A value is better when it differs by more than this."""
