"""REINFORCE++: the return of each token, normalised over all tokens of the batch (arXiv 2501.03262, section 3).

The return of a token is the answer's reward minus the KL penalties from that token on (`kl_in: reward`; without them it
is the reward). No group is needed: one answer per prompt is enough.
"""

from __future__ import annotations

import numpy as np

from trainer.objectives.advantages.normalise import StdOptions, normalised
from trainer.objectives.port import Advantage, RewardedSamples


def compute(samples: RewardedSamples, options: StdOptions) -> np.ndarray:
    """Compute one advantage per token."""
    returns_N = np.repeat(samples.rewards_B, samples.lengths_B)
    if samples.penalties_N is not None:
        # rewards_B is reduced by all penalties: those before a token are added back
        parts = np.split(samples.penalties_N, np.cumsum(samples.lengths_B)[:-1])
        returns_N = returns_N + np.concatenate([np.cumsum(part) - part for part in parts])
    return normalised(returns_N, options.std_eps)


ADVANTAGE = Advantage(
    name="reinforce_pp",
    compute=compute,
    options=StdOptions,
    keys=("std_eps",),
    is_within_group=False,
    is_per_trajectory=True,
)
