"""SAPO: a soft gate in place of the clip (arXiv 2511.20347, section 3, eq. 5 and 6).

    u = exp(c - p)
    loss = - (4 / t) * sigmoid(t * (u - 1)) * A        t = temperature_positive if A > 0 else temperature_negative

The gradient equals PPO's at u = 1 and decreases smoothly on both sides of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Temperatures of the gate."""

    temperature_positive: float = Field(1.0, gt=0)
    """Used where the advantage is positive."""
    temperature_negative: float = Field(1.05, gt=0)
    """Used elsewhere: higher, so that the gradient decreases faster."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the gated surrogate of each token."""
    assert tokens.proximal_N is not None
    ratio_N = (current_N - tokens.proximal_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    negative_N = ratio_N.new_full(ratio_N.shape, options.temperature_negative)
    temperature_N = negative_N.masked_fill(tokens.advantage_N > 0, options.temperature_positive)
    gate_N = (temperature_N * (ratio_N - 1.0)).sigmoid()
    slope_N = 4.0 * gate_N.detach() * (1.0 - gate_N.detach())  # 1 at u = 1
    return TokenLoss(-4.0 / temperature_N * gate_N * tokens.advantage_N, token_metrics={"gate_slope": slope_N})


OBJECTIVE = Objective(name="sapo", loss=loss, options=Options)
