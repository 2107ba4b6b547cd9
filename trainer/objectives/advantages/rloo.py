"""RLOO: r minus the mean of the others in the group (arXiv 2402.14740, section 2.2)."""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages.normalise import centred
from trainer.objectives.port import Advantage, NoOptions, RewardedSamples


def compute(samples: RewardedSamples, options: NoOptions) -> np.ndarray:
    """Compute one advantage per sample: r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)."""
    result_B = np.zeros(len(samples.rewards_B), np.float64)
    for members in samples.groups():
        num = len(members)
        if num > 1:
            result_B[members] = centred(samples.rewards_B[members]) * (num / (num - 1))
    return result_B


ADVANTAGE = Advantage(name="rloo", compute=compute, single_sample="there is no other sample to compare with")
