"""VESPO: a smooth weight of the whole sequence's ratio (arXiv 2602.10693).

    log W = sum over the sequence of (c - b), each clamped to +-20, then clamped to [log 1e-8, 20]
    phi = exp(l + k * log W - l * W)        (k, l) of the positive options if A >= 0, else of the negative ones
    loss = - sg(phi) * A * c

phi(1) = 1; it decreases on both sides of W = k / l, and faster above. With k < l for positive advantages and k > l for
negative ones, stale answers with a negative advantage lose their influence first. The log-ratios of a sequence are
summed, not averaged: long sequences are weighted by their full ratio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import LOG_RATIO_CLAMP, Needs, Objective, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch

LOWEST_LOG_WEIGHT = math.log(1e-8)


class Options(Settings):
    """Shape of the weight."""

    k_positive: float = Field(2.0, gt=0)
    """Power of W where the advantage is at least 0."""
    lambda_positive: float = Field(3.0, gt=0)
    """Decay in W where the advantage is at least 0."""
    k_negative: float = Field(3.0, gt=0)
    """Power of W where the advantage is negative."""
    lambda_negative: float = Field(2.0, gt=0)
    """Decay in W where the advantage is negative."""


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the weighted log-prob of each token."""
    assert tokens.sequences is not None
    log_ratio_N = (current_N.detach() - tokens.behaviour_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    log_weight_S = tokens.sequences.sum(log_ratio_N).clamp(LOWEST_LOG_WEIGHT, LOG_RATIO_CLAMP)
    log_weight_N = tokens.sequences.spread(log_weight_S)
    is_good_N = tokens.advantage_N >= 0
    good_N, bad_N = (
        (decay + k * log_weight_N - decay * log_weight_N.exp()).exp()
        for k, decay in (
            (options.k_positive, options.lambda_positive),
            (options.k_negative, options.lambda_negative),
        )
    )
    phi_N = good_N.where(is_good_N, bad_N)
    return TokenLoss(-phi_N * tokens.advantage_N * current_N, token_metrics={"phi_mean": phi_N})


OBJECTIVE = Objective(name="vespo", loss=loss, options=Options, needs=Needs(proximal="behaviour", sequences=True))
