"""DPPO: a trust region in probabilities, not ratios (arXiv 2602.04879, binary total variation), with a k2 penalty.

    r = exp(c - b)        relative to the policy that sampled
    keep = not (A > 0 and e^c - e^b > max_increase) and not (A < 0 and e^c - e^b < -max_decrease)
    loss = - keep * r * A + k2_coef * (c - b)^2

For a rare token a ratio is not meaningful: 1e-5 to 5e-5 is a ratio of 5 and changes almost nothing. The penalty applies
to all tokens, including dropped ones (Kimi K2.5, arXiv 2602.02276); the defaults are those of prime-rl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Needs, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Trust region and penalty."""

    max_increase: float = Field(0.2, gt=0, le=1)
    """Increase of the probability above which a token with a positive advantage is dropped."""
    max_decrease: float = Field(0.2, gt=0, le=1)
    """Decrease of the probability above which a token with a negative advantage is dropped."""
    k2_coef: float = Field(1e-3, ge=0)
    """Weight of (c - b)^2; 0: no penalty."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the masked surrogate and the penalty of each token."""
    log_ratio_N = current_N - tokens.behaviour_N
    rise_N = current_N.detach().exp() - tokens.behaviour_N.exp()
    is_dropped_N = (tokens.advantage_N > 0) & (rise_N > options.max_increase)
    is_dropped_N = is_dropped_N | ((tokens.advantage_N < 0) & (rise_N < -options.max_decrease))
    ratio_N = log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    loss_N = -(ratio_N * tokens.advantage_N).masked_fill(is_dropped_N, 0.0)
    penalty_N = options.k2_coef * log_ratio_N.square() if options.k2_coef > 0 else None
    return TokenLoss(loss_N, penalty_N, token_metrics={"clip_fraction": is_dropped_N})


def needs(options: Options) -> Needs:
    """Return the needs; the penalty has a gradient even where the advantage is 0."""
    return Needs(proximal="behaviour", every_sequence=options.k2_coef > 0)


OBJECTIVE = Objective(name="dppo", loss=loss, options=Options, needs=needs)
