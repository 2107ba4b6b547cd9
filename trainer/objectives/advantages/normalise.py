"""The standard score, which several advantages use."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from areal_like.settings import Settings


class StdOptions(Settings):
    """A key of trainer.advantage."""

    std_eps: float = Field(1e-4, gt=0)
    """Added to the standard deviation."""


def normalised(rewards: np.ndarray, std_eps: float) -> np.ndarray:
    """(r - mean) / (std + eps), with the population's standard deviation, which is defined for every size."""
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)  # exactly 0: the mean of equal numbers may have a rounding error
    score: np.ndarray = (rewards - rewards.mean()) / (rewards.std() + std_eps)
    return score


def centred(rewards: np.ndarray) -> np.ndarray:
    """r - mean; exactly 0 for equal rewards, which do not say which answer was better."""
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    difference: np.ndarray = rewards - rewards.mean()
    return difference
