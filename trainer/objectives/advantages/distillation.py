"""On-policy distillation: the reverse KL to a teacher on the policy's own samples (GKD, arXiv 2306.13649).

For each sampled token, with c0 its log-prob at the start of the step and t that under the teacher:

    A = coef * (t - c0), limited to [-clip, clip], + reward_coef * (R - mean of the group)

The gradient of the mean of A log-prob is minus the gradient of the KL from the policy to the teacher, token by token:
what follows a token does not count for it. Samples of an older policy are weighted as with any other advantage.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from areal_like.settings import Settings
from trainer.objectives.port import Advantage, RewardedSamples


class Options(Settings):
    """Weights of the two terms."""

    coef: float = Field(1.0, gt=0)
    """Of the log-ratio between teacher and policy."""
    clip: float | None = Field(10.0, gt=0)
    """Bound of a token's log-ratio, nats: a token that the teacher never says would dominate the step; null: none."""
    reward_coef: float = Field(0.0, ge=0)
    """Of the reward minus the mean of its group; 0: rewards are only reported."""


def compute(samples: RewardedSamples, options: Options) -> np.ndarray:
    """Compute one advantage per token."""
    assert samples.start_N is not None
    assert samples.teacher_N is not None
    ratio_N = samples.teacher_N - samples.start_N
    if options.clip is not None:
        ratio_N = np.clip(ratio_N, -options.clip, options.clip)
    result_N = options.coef * ratio_N
    if options.reward_coef > 0:
        centred_B = np.zeros(len(samples.rewards_B))
        for members in samples.groups():
            centred_B[members] = samples.rewards_B[members] - samples.rewards_B[members].mean()
        result_N = result_N + options.reward_coef * np.repeat(centred_B, samples.lengths_B)
    return result_N


def metrics(samples: RewardedSamples, options: Options) -> dict[str, float]:
    """teacher_kl: mean log-ratio of policy and teacher over the sampled tokens, nats: an estimate of the reverse KL."""
    assert samples.start_N is not None
    assert samples.teacher_N is not None
    return {"teacher_kl": float((samples.start_N - samples.teacher_N).mean())}


ADVANTAGE = Advantage(
    name="distillation", compute=compute, options=Options, needs_starts=True, needs_teacher=True, metrics=metrics,
    is_within_group=False,
)  # fmt: skip
