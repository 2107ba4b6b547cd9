"""GRPO: (r - mean) / (std + eps) within the group (arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages.normalise import StdOptions, normalised
from trainer.objectives.port import Advantage, RewardedSamples


def compute(samples: RewardedSamples, options: StdOptions) -> np.ndarray:
    """Compute one advantage per sample."""
    result_B = np.zeros(len(samples.rewards_B), np.float64)
    for members in samples.groups():
        result_B[members] = normalised(samples.rewards_B[members], options.std_eps)
    return result_B


ADVANTAGE = Advantage(
    name="grpo",
    compute=compute,
    options=StdOptions,
    keys=("std_eps",),
    single_sample="the standard deviation of one reward is 0",
)
