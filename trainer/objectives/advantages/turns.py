"""Advantages by turn: the rewards from a turn on, compared with the same turn of the group's other samples.

    G_k = sum over j >= k of discount^(j - k) * r_j        of each sample, for its turns k
    A_k = (G_k - mean over the group of G_k) / (std of the group's differences + eps), at every token of turn k

This is the return of a turn with a baseline for each turn (Williams 1992; for turns of language models arXiv
2505.11821). Turns after the last one that at least two samples of the group have are compared with that one, because
such a turn alone would be its own baseline. A sample without rewards by turn is one turn with its total reward, so in a
group of such samples this equals `grpo`. The turns of a sample with several trajectories are concatenated in the order
of its trajectories.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from trainer.objectives.advantages.normalise import StdOptions
from trainer.objectives.port import Advantage, RewardedSamples


class TurnsOptions(StdOptions):
    """Options of `turns`."""

    discount: float = Field(1.0, ge=0, le=1)
    """Discount of a reward for each turn of distance."""


def compute(samples: RewardedSamples, options: TurnsOptions) -> np.ndarray:
    """Compute one advantage per sampled token."""
    lengths_BK, returns_BK = [], []
    for sample in range(len(samples.rewards_B)):
        lengths_K, rewards_K = samples.turns_of(sample)
        lengths_BK.append(lengths_K)
        returns_BK.append(returns_of(rewards_K, options.discount))
    result_BK = [np.zeros_like(returns_K) for returns_K in returns_BK]
    for members in samples.groups():
        scores = scored([returns_BK[sample] for sample in members], options.std_eps)
        for sample, scores_K in zip(members, scores, strict=True):
            result_BK[sample] = scores_K
    return np.concatenate([np.repeat(values, lengths) for values, lengths in zip(result_BK, lengths_BK, strict=True)])


def returns_of(rewards_K: np.ndarray, discount: float) -> np.ndarray:
    """Sum of the rewards from each turn on, discounted, float64 [K]."""
    returns_K = np.array(rewards_K, np.float64)
    for turn in range(len(returns_K) - 2, -1, -1):
        returns_K[turn] += discount * returns_K[turn + 1]
    return returns_K


def scored(returns_SK: list[np.ndarray], std_eps: float) -> list[np.ndarray]:
    """Advantages of one group's turns: for each sample, one number per turn."""
    num_turns = np.sort([len(returns_K) for returns_K in returns_SK])
    last = max(int(num_turns[-2]) - 1, 0) if len(num_turns) > 1 else 0
    places = [np.minimum(np.arange(len(returns_K)), last) for returns_K in returns_SK]
    flat, at = np.concatenate(returns_SK), np.concatenate(places)
    differences = np.zeros_like(flat)
    for turn in np.unique(at):
        here = at == turn
        if flat[here].min() != flat[here].max():  # equal ones give exactly 0: their mean may have a rounding error
            differences[here] = flat[here] - flat[here].mean()
    scores = differences / (np.sqrt(np.mean(differences**2)) + std_eps)
    return np.split(scores, np.cumsum([len(returns_K) for returns_K in returns_SK])[:-1])


ADVANTAGE = Advantage(
    name="turns",
    compute=compute,
    options=TurnsOptions,
    keys=("std_eps",),
    is_within_group=False,  # equal sums may come from rewards in different turns
    single_sample="there are no other turns to compare with",
)
