"""GSPO: PPO's clip on one ratio per sequence (arXiv 2507.18071, section 4.1, eq. 5 and 7).

For a sequence of L tokens with proximal log-probs p and current c:

    s = exp(mean(c - p))
    loss of each of its tokens = - min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)

With `aggregation: sequence_mean` its L tokens add up to the paper's one term per sequence. The clip applies to a mean
over tokens, so its bounds are two to three orders of magnitude nearer to 1 than PPO's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Needs, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bounds of the clip."""

    eps_low: float = Field(3e-4, ge=0, lt=1)
    """Trust region 1 - eps_low of the sequence's ratio (the paper's value, section 5.1)."""
    eps_high: float = Field(4e-4, ge=0)
    """Trust region 1 + eps_high of the sequence's ratio."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the clipped surrogate of each token's sequence."""
    assert tokens.proximal_N is not None
    assert tokens.sequences is not None
    mean_S = tokens.sequences.mean(current_N - tokens.proximal_N)
    ratio_N = tokens.sequences.spread(mean_S).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    free_N = ratio_N * tokens.advantage_N
    clipped_N = ratio_N.clamp(1.0 - options.eps_low, 1.0 + options.eps_high) * tokens.advantage_N
    return TokenLoss(-free_N.minimum(clipped_N), token_metrics={"clip_fraction": clipped_N < free_N})


OBJECTIVE = Objective(name="gspo", loss=loss, options=Options, needs=Needs(sequences=True))
