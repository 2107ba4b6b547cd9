"""CISPO: the ratio is bounded and a constant for the gradient (MiniMax-M1, arXiv 2506.13585, section 3.1, eq. 4 and 5).

    u = exp(c - p)
    loss = - sg(min(u, max_ratio)) * A * c

Unlike with PPO's clip, every token keeps its gradient. There is no lower bound, as in the paper's experiments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Bound of the ratio."""

    max_ratio: float = Field(5.0, gt=0)
    """Largest ratio that counts: 1 + eps_high of the paper (5: ScaleRL, arXiv 2510.13786)."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the weighted log-prob of each token."""
    assert tokens.proximal_N is not None
    ratio_N = (current_N.detach() - tokens.proximal_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    loss_N = -ratio_N.clamp(max=options.max_ratio) * tokens.advantage_N * current_N
    return TokenLoss(loss_N, token_metrics={"clip_fraction": ratio_N > options.max_ratio})


OBJECTIVE = Objective(name="cispo", loss=loss, options=Options)
