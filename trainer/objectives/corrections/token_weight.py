"""Importance weight of a token as a correction: min(exp(d), max), of a selectable part of the ratio.

`trainer.loss.weight` is the same weight of the whole ratio. Two of these, one with `part: mismatch` and one with `part:
staleness`, truncate the mismatch of engine and trainer separately from the changes by training (arXiv 2605.12070).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bound of the weight."""

    max: float = Field(5.0, gt=0)
    """Larger weights count as this one."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Compute the weight of each token."""
    assert tokens.drift_N is not None
    return tokens.drift_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().clamp(max=options.max)


CORRECTION = Correction(name="token_weight", factor=factor, options=Options, is_weight=True)
