"""Sequence mask by its worst token (SkyRL and verl call it veto or outlier mask).

A sequence is kept if every token has min_ratio <= exp(d) <= max_ratio, with d the log-prob at the start of the step
minus the behaviour log-prob. A single token that the trained policy would hardly have sampled rejects the whole answer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Window of every token's ratio."""

    min_ratio: float = Field(1e-5, gt=0, lt=1)
    """A ratio below it drops the sequence."""
    max_ratio: float | None = Field(None, gt=1)
    """A ratio above it drops the sequence; null: no upper bound."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Keep sequences without an outlier."""
    assert tokens.drift_N is not None
    assert tokens.sequences is not None
    is_outlier_N = tokens.drift_N < math.log(options.min_ratio)
    if options.max_ratio is not None:
        is_outlier_N = is_outlier_N | (tokens.drift_N > math.log(options.max_ratio))
    return tokens.sequences.spread(tokens.sequences.max(is_outlier_N.to(tokens.drift_N.dtype))) == 0


CORRECTION = Correction(name="veto", factor=factor, options=Options, needs=Needs(sequences=True))
