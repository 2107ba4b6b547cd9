"""Generalised advantage estimation from a critic's values (arXiv 1506.02438, equation 16), per token or per turn.

With V_t the critic's value before step t, r_t its reward, and K steps of an answer:

    d_t = r_t + gamma * V_(t+1) - V_t
    A_t = d_t + gamma * lambda * A_(t+1)

A step is a sampled token or a turn: a run of sampled tokens without tokens of the environment between them. The value
of a turn is that of its first token, its reward the sum over its tokens, and all its tokens have its advantage. The
reward of the answer is added to the last step; the KL penalty of a token (`kl_in: reward`) is subtracted at its step.
After the last step V is 0, or with `bootstrap_cut` the critic's value after the last token if the answer was truncated
at the token limit.

If a sample has several trajectories, each is treated as a separate answer, with the sample's reward at its end.

The targets of the critic are A_t + V_t, also for turns, with `target_lambda` in place of lambda if it is set
(decoupled GAE, arXiv 2503.01491).

Shapes: B samples (or Q trajectories, each treated as a sample), N sampled tokens, K steps, concatenated over samples.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from trainer.objectives.advantages.normalise import StdOptions, normalised
from trainer.objectives.port import Advantage, RewardedSamples


class GaeOptions(StdOptions):
    """Discounts and units of the estimate."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per step."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """1: the return minus the value; 0: one step ahead."""
    target_lambda: float | None = Field(None, ge=0, le=1)
    """Lambda of the critic's targets; null: gae_lambda."""
    unit: Literal["token", "turn"] = "token"
    """Unit of a step."""
    bootstrap_cut: bool = False
    """Count the critic's value after the last token of an answer that was truncated at the token limit."""
    normalise: bool = True
    """Subtract the mean over all tokens of the batch and divide by their standard deviation plus std_eps."""


def compute(samples: RewardedSamples, options: GaeOptions) -> np.ndarray:
    """Compute one advantage per token."""
    advantages_N, _ = _estimate(samples, options, options.gae_lambda)
    return normalised(advantages_N, options.std_eps) if options.normalise else advantages_N


def targets(samples: RewardedSamples, options: GaeOptions) -> np.ndarray:
    """Compute the critic's target per token: advantage, not normalised, plus value."""
    lambda_ = options.gae_lambda if options.target_lambda is None else options.target_lambda
    advantages_N, values_N = _estimate(samples, options, lambda_)
    return advantages_N + values_N


def _estimate(samples: RewardedSamples, options: GaeOptions, lambda_: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantage and value of each token's step, float64 [N]."""
    assert samples.values_N is not None
    assert samples.end_values_Q is not None
    starts_N = samples.turn_starts_N if options.unit == "turn" else np.ones(len(samples.values_N), bool)
    assert starts_N is not None
    first_K = np.flatnonzero(starts_N)
    rewards_K = np.add.reduceat(samples.token_rewards_N(), first_K)
    values_K = samples.values_N.astype(np.float64)[first_K]
    steps_B = np.add.reduceat(starts_N.astype(np.int64), np.cumsum([0, *samples.lengths_B[:-1]]))
    ends_B = np.zeros(len(steps_B))
    if options.bootstrap_cut:
        assert samples.is_cut_Q is not None
        ends_B = np.where(samples.is_cut_Q, samples.end_values_Q.astype(np.float64), 0.0)
    next_K = np.append(values_K[1:], 0.0)
    next_K[np.cumsum(steps_B) - 1] = ends_B
    advantages_K = _discounted(rewards_K + options.gamma * next_K - values_K, steps_B, options.gamma * lambda_)
    lengths_K = np.diff(np.append(first_K, len(starts_N)))
    return np.repeat(advantages_K, lengths_K), np.repeat(values_K, lengths_K)


def _discounted(terms_K: np.ndarray, steps_B: np.ndarray, decay: float) -> np.ndarray:
    """x_t = term_t + decay * x_(t+1) within each sample; computed from the ends, for all samples at once."""
    order = np.argsort(-steps_B, kind="stable")
    steps, ends = steps_B[order], np.cumsum(steps_B)[order]
    sums_K, running_B = np.empty_like(terms_K), np.zeros(len(steps_B))
    # samples with at least 1, 2, ... steps
    num_longer = np.searchsorted(-steps, -np.arange(1, steps[0] + 1), side="right")
    for back, num in enumerate(num_longer, 1):
        places = ends[:num] - back
        running_B[:num] = terms_K[places] + decay * running_B[:num]
        sums_K[places] = running_B[:num]
    return sums_K


ADVANTAGE = Advantage(
    name="gae",
    compute=compute,
    options=GaeOptions,
    keys=("std_eps",),
    needs_values=True,
    targets=targets,
    is_within_group=False,
    is_per_trajectory=True,
)
