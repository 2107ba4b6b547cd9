"""(r - mean) / (std + eps) over all samples of the batch, regardless of group (arXiv 2505.24298, section 5.2)."""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages.normalise import StdOptions, normalised
from trainer.objectives.port import Advantage, RewardedSamples


def compute(samples: RewardedSamples, options: StdOptions) -> np.ndarray:
    """Compute one advantage per sample; exactly 0 for a batch of equal rewards."""
    return normalised(samples.rewards_B, options.std_eps)


ADVANTAGE = Advantage(name="global_norm", compute=compute, options=StdOptions, keys=("std_eps",), is_within_group=False)
