"""Clipped surrogate of PPO against the proximal policy (arXiv 2505.24298, section 5.2, eq. 5).

For a token with proximal log-prob p, current c and advantage A:

    u = exp(c - p)        trust region
    loss = - min(u * A, clip(u, 1 - eps_low, 1 + eps_high) * A)

With dual_clip = k (arXiv 1912.09729, eq. 5) the minimum is raised to k * A where A < 0. There the clip alone has no
bound, and a single token with a very large ratio would outweigh all others. An upper clip larger than the lower one is
DAPO's clip-higher (arXiv 2503.14476, section 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.corrections.dual_clip import dual_clipped
from trainer.objectives.port import LOG_RATIO_CLAMP, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Trust region; keys of trainer.loss."""

    eps_low: float = Field(0.2, ge=0, lt=1)
    """Trust region 1 - eps_low."""
    eps_high: float = Field(0.2, ge=0)
    """Trust region 1 + eps_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts where the advantage is negative; null: none."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the clipped surrogate of each token."""
    assert tokens.proximal_N is not None
    ratio_N = (current_N - tokens.proximal_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    free_N = ratio_N * tokens.advantage_N
    clipped_N = ratio_N.clamp(1.0 - options.eps_low, 1.0 + options.eps_high) * tokens.advantage_N
    surrogate_N = free_N.minimum(clipped_N)
    metrics = {"clip_fraction": clipped_N < free_N}
    if options.dual_clip is not None:
        surrogate_N, metrics["dual_clip_share"] = dual_clipped(
            surrogate_N, ratio_N, tokens.advantage_N, options.dual_clip
        )
    return TokenLoss(-surrogate_N, token_metrics=metrics)


OBJECTIVE = Objective(name="decoupled_ppo", loss=loss, options=Options, keys=("eps_low", "eps_high", "dual_clip"))
