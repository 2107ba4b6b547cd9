"""Rewards to advantages: scale, bias and clip first, then a baseline and a unit by group.

Owns: `advantages`, `shaped_rewards`. Refuses: knowing tokens. Groups are known by id, never by stride, so that groups
which lost samples on the way are normalised right.

Shapes: B samples of one batch.
"""

from __future__ import annotations

import numpy as np

from trainer.config import AdvantageSettings


def shaped_rewards(rewards_B: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """(r + bias) * scale, then clipped to [-clip, clip]; float64."""
    shaped_B = (np.asarray(rewards_B, np.float64) + settings.reward_bias) * settings.reward_scale
    if settings.reward_clip is not None:
        shaped_B = np.clip(shaped_B, -settings.reward_clip, settings.reward_clip)
    return shaped_B


def advantages(rewards_B: np.ndarray, group_ids_B: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """One advantage per sample, float32 [B], of raw rewards; samples of a group may lie anywhere in the batch.

    grpo: (r - mean) / (std + eps) in the group (arXiv 2402.03300, eq. of section 4.1.2; std of the population, so that
    it exists for every size). grpo_no_std: r - mean (Dr. GRPO, arXiv 2503.20783). rloo: r - mean of the others in the
    group (arXiv 2402.14740). global_norm: (r - mean) / (std + eps) over all samples (arXiv 2505.24298, section 5.2).
    A group of one, or of equal rewards, says nothing about which answer was better: its advantage is exactly 0 (in
    global_norm that holds for a whole batch of equal rewards).
    """
    rewards_B = shaped_rewards(rewards_B, settings)
    group_ids_B = np.asarray(group_ids_B)
    assert rewards_B.ndim == 1
    assert rewards_B.shape == group_ids_B.shape
    assert len(rewards_B)
    assert np.isfinite(rewards_B).all()
    result_B = np.zeros(len(rewards_B), np.float64)
    if settings.kind == "global_norm":
        result_B[:] = _normalised(rewards_B, settings.std_eps)
        return result_B.astype(np.float32)
    for group_id in np.unique(group_ids_B):
        members = np.flatnonzero(group_ids_B == group_id)
        rewards_G = rewards_B[members]
        if settings.kind == "grpo":
            result_B[members] = _normalised(rewards_G, settings.std_eps)
        elif rewards_G.min() < rewards_G.max():
            centred_G = rewards_G - rewards_G.mean()
            # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
            factor = len(members) / (len(members) - 1) if settings.kind == "rloo" else 1.0
            result_B[members] = centred_G * factor
    return result_B.astype(np.float32)


def _normalised(rewards: np.ndarray, std_eps: float) -> np.ndarray:
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)  # exactly: the mean of equal numbers may be off by a rounding
    normalised: np.ndarray = (rewards - rewards.mean()) / (rewards.std() + std_eps)
    return normalised
