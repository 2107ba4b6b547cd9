"""LitePPO: (r - mean of the group) / (std of the batch + eps) (arXiv 2508.08221, section 4).

TRL calls it `scale_rewards: batch`.

The standard deviation over the whole batch does not amplify groups whose rewards are almost equal. The paper uses it
with `aggregation: token_mean` and plain PPO.
"""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages import grpo_no_std
from trainer.objectives.advantages.normalise import StdOptions
from trainer.objectives.port import Advantage, NoOptions, RewardedSamples


def compute(samples: RewardedSamples, options: StdOptions) -> np.ndarray:
    """Compute one advantage per sample."""
    centred_B = grpo_no_std.compute(samples, NoOptions())
    scaled_B: np.ndarray = centred_B / (samples.rewards_B.std() + options.std_eps)
    return scaled_B


ADVANTAGE = Advantage(
    name="lite_ppo",
    compute=compute,
    options=StdOptions,
    keys=("std_eps",),
    single_sample="a reward is its own mean",
)
