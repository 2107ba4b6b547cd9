"""Dr. GRPO: r - mean within the group, without its standard deviation (arXiv 2503.20783, section 3.2)."""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages.normalise import centred
from trainer.objectives.port import Advantage, NoOptions, RewardedSamples


def compute(samples: RewardedSamples, options: NoOptions) -> np.ndarray:
    """Compute one advantage per sample."""
    result_B = np.zeros(len(samples.rewards_B), np.float64)
    for members in samples.groups():
        result_B[members] = centred(samples.rewards_B[members])
    return result_B


ADVANTAGE = Advantage(name="grpo_no_std", compute=compute, single_sample="a reward is its own mean")
