"""Off-policy optimal baseline: r minus the baseline of least variance (VCPO, arXiv 2602.17616, section 4.2).

For the samples of a group, with w the importance weight of a sample (its probability at the start of the step divided
by that under the policy that sampled it) and g the norm of the gradient of its log-prob:

    b = sum w^2 g^2 r / sum w^2 g^2
    A = r - b

The gradient estimate from w (r - b) has its least variance at this b (trace of the covariance, to first order). A
sample that would dominate the estimate is compared with itself: its advantage tends to 0, while a mean over the group
would leave it large. w is a product over the tokens of the sample, truncated only if `max_weight` is set.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Advantage, RewardedSamples


class Options(Settings):
    """How the baseline is weighted."""

    gradient_norm: Literal["exact", "length"] = "exact"
    """`exact`: g of each sample, by a separate backward pass before the step; `length`: g^2 proportional to the number
    of sampled tokens (arXiv 2505.23585), without such passes."""
    max_weight: float | None = Field(None, gt=0)
    """Larger w count as this one; null: no truncation."""


def compute(samples: RewardedSamples, options: Options) -> np.ndarray:
    """Compute one advantage per sample."""
    assert samples.log_weights_B is not None
    log_weights_B = samples.log_weights_B.astype(np.float64)
    if options.max_weight is not None:
        log_weights_B = np.minimum(log_weights_B, math.log(options.max_weight))
    squares_B = samples.square_norms_B if options.gradient_norm == "exact" else samples.lengths_B
    assert squares_B is not None
    result_B = np.zeros(len(samples.rewards_B), np.float64)
    for members in samples.groups():
        rewards = samples.rewards_B[members] - samples.rewards_B[members[0]]  # equal rewards give exactly 0
        log_weights = log_weights_B[members]
        shares = np.exp(2 * (log_weights - log_weights.max())) * squares_B[members]
        total = shares.sum()
        result_B[members] = rewards - ((shares * rewards).sum() / total if total > 0 else rewards.mean())
    return result_B


def needs_norms(options: Options) -> bool:
    """True if the options need gradient norms."""
    return options.gradient_norm == "exact"


ADVANTAGE = Advantage(
    name="opob",
    compute=compute,
    options=Options,
    needs_starts=True,
    needs_norms=needs_norms,
    single_sample="the reward of the sample is its own baseline",
)
