"""Token mask by ratio (IcePop; Ring-1T, arXiv 2510.18855).

A token is kept if low <= exp(d) <= high, with d the log-prob at the start of the step minus the behaviour log-prob.
`weight.mode: mask` combines the same mask with the weight exp(d); this correction does not change the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Window of the ratio."""

    low: float = Field(0.5, ge=0)
    """Smallest ratio that is kept."""
    high: float = Field(5.0, gt=0)
    """Largest ratio that is kept."""

    @model_validator(mode="after")
    def _holds_one(self) -> Options:
        if not self.low < 1.0 < self.high:
            raise ValueError(
                f"low ({self.low:g}) must be less than 1 and high ({self.high:g}) greater than 1, because "
                "the ratio of an on-policy token is 1"
            )
        return self


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep tokens inside the window."""
    assert tokens.drift_N is not None
    ratio_N = tokens.drift_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return (ratio_N >= options.low) & (ratio_N <= options.high)


CORRECTION = Correction(name="icepop", factor=factor, options=Options)
