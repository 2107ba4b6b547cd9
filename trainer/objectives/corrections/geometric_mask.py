"""Sequence mask by the geometric mean of its ratios (SkyRL's recommended default; verl's `seq_mean_k1`).

A sequence is kept if low <= exp(mean(d)) <= high, with d the log-prob at the start of the step minus the behaviour
log-prob. The mean does not grow with length, so the window is narrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Window of the mean ratio."""

    low: float = Field(0.99, ge=0)
    """Smallest geometric mean that is kept."""
    high: float = Field(1.01, gt=0)
    """Largest geometric mean that is kept."""

    @model_validator(mode="after")
    def _holds_one(self) -> Options:
        if not self.low < 1.0 < self.high:
            raise ValueError(
                f"low ({self.low:g}) must be less than 1 and high ({self.high:g}) greater than 1, because "
                "the geometric mean of on-policy ratios is 1"
            )
        return self


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep sequences inside the window."""
    assert tokens.drift_N is not None
    assert tokens.sequences is not None
    mean_S = tokens.sequences.mean(tokens.drift_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return tokens.sequences.spread((mean_S >= options.low) & (mean_S <= options.high))


CORRECTION = Correction(name="geometric_mask", factor=factor, options=Options, needs=Needs(sequences=True))
