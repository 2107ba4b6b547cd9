"""Importance weight of a whole sequence, truncated (verl's `rollout_is: sequence`).

    w = min(exp(sum(d)), max)        or exp(mean(d)) with `reduce: mean`

with d the log-prob at the start of the step minus the behaviour log-prob. Without truncation the product is the
unbiased weight of a sequence; its variance grows with length. It replaces `trainer.loss.weight`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Correction, Needs, TokenInputs

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """How the weight is computed."""

    max: float = Field(2.0, gt=0)
    """Largest weight."""
    reduce: Literal["sum", "mean"] = "sum"
    """`sum`: product of the tokens' ratios; `mean`: their geometric mean."""


def factor(tokens: TokenInputs, options: Options) -> torch.Tensor:
    """Compute the weight of each token's sequence."""
    assert tokens.drift_N is not None
    assert tokens.sequences is not None
    reduce = tokens.sequences.sum if options.reduce == "sum" else tokens.sequences.mean
    weight_S = reduce(tokens.drift_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().clamp(max=options.max)
    return tokens.sequences.spread(weight_S)


CORRECTION = Correction(
    name="sequence_weight", factor=factor, options=Options, needs=Needs(sequences=True), is_weight=True
)
