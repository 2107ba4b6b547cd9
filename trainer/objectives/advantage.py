"""Computes advantages from rewards: scale, bias and clip first, then the configured kind (advantages/).

How samples are compared is defined by each kind. Groups are identified by id, not by position, so that groups which
lost samples are normalised correctly.

Shapes: B samples of one batch, Q trajectories and N sampled tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_like.errors import UserError
from trainer.config import AdvantageSettings
from trainer.objectives.port import RewardedSamples, TurnRewards
from trainer.objectives.registry import advantage_of


def shaped_rewards(rewards_B: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """(r + bias) * scale, then clipped to [-clip, clip]; float64."""
    shaped_B = (np.asarray(rewards_B, np.float64) + settings.reward_bias) * settings.reward_scale
    if settings.reward_clip is not None:
        shaped_B = np.clip(shaped_B, -settings.reward_clip, settings.reward_clip)
    return shaped_B


def advantages(
    rewards_B: np.ndarray,
    group_ids_B: np.ndarray,
    lengths_B: Sequence[int],
    settings: AdvantageSettings,
    penalties_N: np.ndarray | None = None,
    turns_B: Sequence[TurnRewards | None] = (),
    trajectory_lengths_B: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Compute the advantages of raw rewards: `advantages_of` applied to the result of `rewarded`."""
    samples = rewarded(rewards_B, group_ids_B, lengths_B, settings, penalties_N, turns_B, trajectory_lengths_B)
    return advantages_of(samples, settings)


def rewarded(
    rewards_B: np.ndarray,
    group_ids_B: np.ndarray,
    lengths_B: Sequence[int],
    settings: AdvantageSettings,
    penalties_N: np.ndarray | None = None,
    turns_B: Sequence[TurnRewards | None] = (),
    trajectory_lengths_B: Sequence[Sequence[int]] = (),
) -> RewardedSamples:
    """Shape the rewards of a batch and subtract the penalties.

    Args:
        rewards_B: raw rewards, finite.
        group_ids_B: group of each sample; samples of a group may be anywhere in the batch.
        lengths_B: sampled tokens of each sample.
        settings: how rewards are scaled first.
        penalties_N: penalty subtracted from the reward at each sampled token, in the order of the samples.
        turns_B: raw rewards by turn of each sample, None for a sample without them; empty: no sample has them.
        trajectory_lengths_B: sampled tokens of each trajectory of each sample; empty: each sample is one trajectory.
    """
    rewards_B = shaped_rewards(rewards_B, settings)
    if penalties_N is not None:
        rewards_B = rewards_B - np.add.reduceat(penalties_N, np.cumsum([0, *lengths_B[:-1]]))
    samples = RewardedSamples(
        rewards_B, np.asarray(group_ids_B), np.asarray(lengths_B, np.int64), penalties_N=penalties_N,
        turns_B=[
            turns and TurnRewards(turns.ends_K, settings.reward_scale * np.asarray(turns.rewards_K, np.float64))
            for turns in turns_B
        ],
        trajectory_lengths_B=trajectory_lengths_B,
    )  # fmt: skip
    assert samples.rewards_B.ndim == 1
    assert samples.rewards_B.shape == samples.group_ids_B.shape == samples.lengths_B.shape
    assert len(samples.rewards_B)
    assert np.isfinite(samples.rewards_B).all()
    return samples


def advantages_of(samples: RewardedSamples, settings: AdvantageSettings) -> np.ndarray:
    """Compute advantages, float32: one per sample [B] or per sampled token [N], depending on the kind.

    Raises:
        UserError: advantages of a user's function have another shape, or are not finite.
    """
    advantage, options = advantage_of(settings)
    seen = samples.by_trajectory() if advantage.is_per_trajectory else samples
    num_samples, num_tokens = len(seen.rewards_B), int(seen.lengths_B.sum())
    result = np.asarray(advantage.compute(seen, options))
    if result.shape not in ((num_samples,), (num_tokens,)):
        what = (
            f"{settings.kind} returned an array of shape {list(result.shape)} for {num_samples} samples with "
            f"{num_tokens} tokens"
        )
        raise UserError(
            what, where="trainer.advantage.kind", remedy="return one advantage per sample, or one per token"
        )
    _check_finite(result, "an advantage", settings)
    if len(result) == num_samples != len(samples.rewards_B):
        result = np.repeat(result, seen.lengths_B)
    return result.astype(np.float32)


def targets_of(samples: RewardedSamples, settings: AdvantageSettings) -> np.ndarray:
    """Compute the targets of the critic, float32 per sampled token [N]: those of the kind, or the return.

    Raises:
        UserError: targets of a user's function have another shape, or are not finite.
    """
    advantage, options = advantage_of(settings)
    seen = samples.by_trajectory() if advantage.is_per_trajectory or advantage.targets is None else samples
    result = np.asarray((advantage.targets or _returns)(seen, options))
    if result.shape != (num_tokens := int(samples.lengths_B.sum()),):
        what = f"{settings.kind} returned targets of shape {list(result.shape)} for {num_tokens} tokens"
        raise UserError(what, where="trainer.advantage.kind", remedy="return one target per token")
    _check_finite(result, "a target", settings)
    return result.astype(np.float32)


def _returns(samples: RewardedSamples, options: Any) -> np.ndarray:
    """Sum of rewards from each token to the end of its trajectory, [N]."""
    parts = np.split(samples.token_rewards_N(), np.cumsum(samples.lengths_B)[:-1])
    return np.concatenate([np.cumsum(part[::-1])[::-1] for part in parts])


def _check_finite(result: np.ndarray, noun: str, settings: AdvantageSettings) -> None:
    if not np.isfinite(result).all():
        what = f"{settings.kind} returned {noun} that is not finite"
        raise UserError(
            what, where="trainer.advantage.kind", remedy="check the function for divisions by 0 and for overflows"
        )


def spread(advantages: np.ndarray, trajectory_lengths_B: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Split what `advantages` returned into one array per trajectory, with one advantage for each of its tokens."""
    if len(advantages) == len(trajectory_lengths_B):
        pairs = zip(trajectory_lengths_B, advantages, strict=True)
        return [np.full(length, value, np.float32) for lengths, value in pairs for length in lengths]
    return np.split(advantages, np.cumsum([length for lengths in trajectory_lengths_B for length in lengths])[:-1])
