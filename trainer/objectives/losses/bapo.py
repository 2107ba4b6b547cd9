"""BAPO: PPO whose clip adapts to the balance of positive and negative advantages (arXiv 2510.18927, sec. 4, alg. 1).

    r = exp(c - b)        relative to the policy that sampled
    loss = - min(r * A, clip(r, low, high) * A), bounded by -A * dual_clip where A < 0

Once a step, with r computed at its start, the positive share of the surrogate is the sum of min(r, high) * A over
tokens with A > 0, divided by itself plus the sum of max(r, low) * -A over those with A < 0. While it is below its
target, low is raised step by step, and once low has reached its end, high. A clipped token counts with its bound, as in
the authors' code.

The bounds are the same for all tokens of the step, independent of mini-batches, micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from areal_like.settings import Settings
from trainer.objectives.corrections.dual_clip import dual_clipped
from trainer.objectives.port import LOG_RATIO_CLAMP, Needs, Objective, SumOverRanks, TokenInputs, TokenLoss

if TYPE_CHECKING:
    import torch


class Options(Settings):
    """Target and range of the bounds."""

    target_share: float = Field(0.5, ge=0, le=1)
    """Positive share of the surrogate that the adaptation of the bounds aims at."""
    low_start: float = Field(0.6, ge=0, le=1)
    """Smallest lower bound of the ratio."""
    low_end: float = Field(0.9, ge=0, le=1)
    """Largest lower bound."""
    low_step: float = Field(0.05, gt=0)
    """Increment of the lower bound."""
    high_start: float = Field(1.2, ge=1)
    """Smallest upper bound of the ratio."""
    high_end: float = Field(3.0, ge=1)
    """Largest upper bound."""
    high_step: float = Field(0.05, gt=0)
    """Increment of the upper bound."""
    dual_clip: float = Field(3.0, gt=1)
    """Largest ratio that counts where the advantage is negative."""

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> Options:
        for name, start, end in (("low", self.low_start, self.low_end), ("high", self.high_start, self.high_end)):
            if start > end:
                raise ValueError(f"{name}_start ({start:g}) must not be greater than {name}_end ({end:g})")
        return self


def statistics(parts: Sequence[TokenInputs], sum_over_ranks: SumOverRanks, options: Options) -> Mapping[str, float]:
    """Find the step's bounds."""
    low, high = options.low_start, options.high_start

    def is_short() -> bool:
        good, bad = sum_over_ranks(_contributions(parts, low, high))
        return good < options.target_share * (good + bad)

    while (short := is_short()) and low < options.low_end:
        low = min(low + options.low_step, options.low_end)
    while short and high < options.high_end:
        high = min(high + options.high_step, options.high_end)
        short = is_short()
    return {"low": low, "high": high}


def _contributions(parts: Sequence[TokenInputs], low: float, high: float) -> list[float]:
    """Surrogate of this rank's tokens with a positive and with a negative advantage, both as positive numbers."""
    good = bad = 0.0
    for part in parts:
        assert part.drift_N is not None
        ratio_N = part.drift_N.double().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        good += float((ratio_N.clamp(max=high) * part.advantage_N.clamp(min=0)).sum())
        bad -= float((ratio_N.clamp(min=low) * part.advantage_N.clamp(max=0)).sum())
    return [good, bad]


def loss(current_N: torch.Tensor, tokens: TokenInputs, options: Options) -> TokenLoss:
    """Compute the clipped surrogate of each token with the step's bounds."""
    low, high = tokens.step["bapo"]["low"], tokens.step["bapo"]["high"]
    ratio_N = (current_N - tokens.behaviour_N).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    free_N = ratio_N * tokens.advantage_N
    clipped_N = ratio_N.clamp(low, high) * tokens.advantage_N
    surrogate_N, is_cut_N = dual_clipped(free_N.minimum(clipped_N), ratio_N, tokens.advantage_N, options.dual_clip)
    metrics = {
        "clip_fraction": clipped_N < free_N,
        "dual_clip_share": is_cut_N,
        "clip_low": ratio_N.new_full(ratio_N.shape, low),
        "clip_high": ratio_N.new_full(ratio_N.shape, high),
    }
    return TokenLoss(-surrogate_N, token_metrics=metrics)


OBJECTIVE = Objective(name="bapo", loss=loss, options=Options, needs=Needs(proximal="behaviour"), statistics=statistics)
