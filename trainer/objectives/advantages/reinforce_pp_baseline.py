"""REINFORCE++-baseline: r minus the mean of the group, normalised over all tokens (arXiv 2501.03262, section 3).

The normalisation subtracts the mean over tokens as well. An answer in a group of equal rewards therefore has a small
advantage if long and short answers differ in their rewards.
"""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages import grpo_no_std
from trainer.objectives.advantages.normalise import StdOptions, normalised
from trainer.objectives.port import Advantage, NoOptions, RewardedSamples


def compute(samples: RewardedSamples, options: StdOptions) -> np.ndarray:
    """Compute one advantage per token."""
    return normalised(np.repeat(grpo_no_std.compute(samples, NoOptions()), samples.lengths_B), options.std_eps)


ADVANTAGE = Advantage(
    name="reinforce_pp_baseline",
    compute=compute,
    options=StdOptions,
    keys=("std_eps",),
    is_within_group=False,
    single_sample="a reward is its own mean",
)
