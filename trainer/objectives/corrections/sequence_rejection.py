"""Sequence mask by the product of its ratios (masked importance sampling by sequence; verl's `seq_sum_k1`).

A sequence is kept if low <= exp(sum(d)) <= high, with d the log-prob at the start of the step minus the behaviour
log-prob. The sum grows with length, so long sequences are rejected first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Window of the sequence's ratio."""

    low: float = Field(0.5, ge=0)
    """Smallest product that is kept."""
    high: float = Field(2.0, gt=0)
    """Largest product that is kept."""

    @model_validator(mode="after")
    def _holds_one(self) -> Options:
        if not self.low < 1.0 < self.high:
            raise ValueError(
                f"low ({self.low:g}) must be less than 1 and high ({self.high:g}) greater than 1, because "
                "the product of on-policy ratios is 1"
            )
        return self


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep sequences inside the window."""
    assert tokens.drift_N is not None
    assert tokens.sequences is not None
    product_S = tokens.sequences.sum(tokens.drift_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return tokens.sequences.spread((product_S >= options.low) & (product_S <= options.high))


CORRECTION = Correction(name="sequence_rejection", factor=factor, options=Options, needs=Needs(sequences=True))
