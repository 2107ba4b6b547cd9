"""A batch of samples made ready for training: advantages, mini-batches, packed micro-batches, denominators.

Owns: `prepare_batch` and what it returns. Refuses: the model and any device but the CPU, so that it may run in another
thread, in the shadow of the step before. A pure function of its arguments: same samples, same bits.

With several ranks each prepares the same batch and keeps its own part: advantages, mini-batches and denominators are
those of the whole batch, on any rank. How a batch is cut into mini-batches, micro-batches and ranks changes
no sequence's weight in the step.

Shapes: B samples of the batch, S of a mini-batch or a micro-batch, N sampled tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from areal_like.packing import partition
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from trainer.config import TrainerSettings
from trainer.data.dealing import deal_apart
from trainer.model.packed import PackedSequences
from trainer.objectives.advantage import advantages, by_sample, shaped_rewards
from trainer.objectives.aggregation import token_coefficients
from trainer.objectives.port import TokenInputs, TurnRewards
from trainer.objectives.registry import loss_of


@dataclass(frozen=True)
class MicroBatch:
    """Sequences whose forward and backward pass run together, and what the loss needs of their N sampled tokens.

    samples_S: the place of each sequence in the batch.
    is_dummy: its sequence is another micro-batch's and counts for nothing: this rank only keeps the others company.
    is_silent: its gradient is zero, as no token has an advantage: the forward pass, for the metrics, is all it needs.
    """

    packed: PackedSequences
    inputs: TokenInputs
    samples_S: tuple[int, ...] = ()
    is_dummy: bool = False
    is_silent: bool = False

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        if self.inputs.behaviour_N.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self.inputs).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, packed=self.packed.to(device), inputs=replace(self.inputs, **moved))


@dataclass(frozen=True)
class BatchRewards:
    """What advantages are computed from, of the whole batch: raw rewards, groups, sampled tokens of each sample.

    turn_starts_N: bool, the sampled tokens, in the order of the samples, that begin a turn. is_cut_B: bool, the answer
    ended at the token limit. turns_B: rewards by turn, None for a sample without.
    """

    rewards_B: np.ndarray
    group_ids_B: np.ndarray
    lengths_B: tuple[int, ...]
    turn_starts_N: np.ndarray
    is_cut_B: np.ndarray
    turns_B: tuple[TurnRewards | None, ...]

    @staticmethod
    def of(samples: Sequence[BatchSample]) -> BatchRewards:
        """Those of `samples`."""
        return BatchRewards(
            rewards_B=np.asarray([sample.reward for sample in samples], np.float64),
            group_ids_B=np.asarray([sample.group_id for sample in samples], np.int64),
            lengths_B=tuple(sample.trajectory.num_sampled for sample in samples),
            turn_starts_N=np.concatenate([_turn_starts(sample.trajectory) for sample in samples]),
            is_cut_B=np.array([sample.trajectory.finish_reason == "length" for sample in samples]),
            turns_B=tuple(map(_turns_of, samples)),
        )


@dataclass(frozen=True)
class PreparedBatch:
    """Everything `TrainStep.run` needs. `version` is the policy's at the start of the step: n - 1 in step n."""

    version: int
    mini_batches: tuple[tuple[MicroBatch, ...], ...]
    metrics: dict[str, float]
    rewards: BatchRewards

    @property
    def step(self) -> int:
        """The step this batch is for."""
        return self.version + 1


def prepare_batch(
    samples: Sequence[BatchSample], version: int, settings: TrainerSettings, *, rank: int = 0, num_ranks: int = 1
) -> PreparedBatch:
    """Pack the part that `rank` has of `samples` for the step that starts from policy `version`.

    Advantages, denominators and metrics are those of the whole batch. Where there is a critic advantages are 0 for now:
    they take its values (trainer/step_advantages.py). Raises ValueError for an empty batch.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    lengths = [len(sample.trajectory) for sample in samples]
    rewards = BatchRewards.of(samples)
    group_ids_B, sampled_lengths = rewards.group_ids_B, rewards.lengths_B
    has_critic = settings.critic is not None
    if has_critic:
        found_advantages = np.zeros(len(samples), np.float32)
    else:
        found_advantages = advantages(
            rewards.rewards_B, group_ids_B, sampled_lengths, settings.advantage, turns_B=rewards.turns_B
        )
    advantages_BN = by_sample(found_advantages, sampled_lengths)
    shares = split(lengths, group_ids_B.tolist(), settings.mini_batches)
    coefficients_B = token_coefficients(sampled_lengths, group_ids_B.tolist(), settings.loss, num_updates=len(shares))
    may_be_silent = not has_critic and not loss_of(settings.loss).needs.every_sequence
    is_silent_B = np.array([may_be_silent and not advantages_N.any() for advantages_N in advantages_BN])
    parts = [
        deal_apart([lengths[i] for i in members], is_silent_B[members].tolist(), num_ranks, settings.micro_batch_tokens)
        for members in shares
    ]
    mini_batches = tuple(
        _mini_batch(
            [samples[i] for i in members],
            [advantages_BN[i] for i in members],
            coefficients_B[members],
            version,
            dealt[rank],
            num_silent,
            members,
        )
        for members, (dealt, num_silent) in zip(shares, parts, strict=True)
    )
    metrics = _batch_metrics(samples, rewards.rewards_B, found_advantages, version, settings)
    metrics |= _dealing_metrics(lengths, shares, parts, settings.micro_batch_tokens)
    return PreparedBatch(version, mini_batches, metrics, rewards)


def _turn_starts(trajectory: Trajectory) -> np.ndarray:
    """Sampled tokens that begin a turn, bool: after given tokens, and after the end of a turn that has a reward."""
    mask_T = trajectory.loss_mask_T
    starts_N: np.ndarray = ~mask_T[:-1][mask_T[1:]]  # the first token of a sequence is never sampled
    if trajectory.turn_ends_K is not None:
        starts_N[trajectory.turn_ends_K[:-1]] = True  # nothing was given between two turns
    return starts_N


def _turns_of(sample: BatchSample) -> TurnRewards | None:
    trajectory = sample.trajectory
    if trajectory.turn_ends_K is None or trajectory.turn_rewards_K is None:
        return None
    return TurnRewards(trajectory.turn_ends_K, trajectory.turn_rewards_K)


def split(lengths: Sequence[int], group_ids: Sequence[int], num: int) -> list[list[int]]:
    """Indices of the samples in at most `num` mini-batches of nearly equal tokens.

    Groups stay whole while there are enough of them, otherwise sequences are dealt one by one. None is empty: with
    fewer sequences than `num` there are fewer mini-batches.
    """
    units: dict[int, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        units.setdefault(group_id, []).append(index)
    members = list(units.values()) if len(units) >= num else [[index] for index in range(len(lengths))]
    shares = partition([sum(lengths[i] for i in unit) for unit in members], min(num, len(members)))
    return [sorted(i for unit in share for i in members[unit]) for share in shares]


def _mini_batch(
    samples: Sequence[BatchSample],
    advantages_SN: Sequence[np.ndarray],
    coefficients_S: np.ndarray,
    version: int,
    own: Sequence[Sequence[int]],
    num_silent: int,
    places: Sequence[int],
) -> tuple[MicroBatch, ...]:
    """The micro-batches `own` (indices of `samples`) of a mini-batch; the first `num_silent` have no gradient.

    places: of `samples` in the batch.
    """
    shortest = min(range(len(samples)), key=lambda index: len(samples[index].trajectory))
    made = [
        replace(
            _micro_batch(
                [samples[i] for i in members], [advantages_SN[i] for i in members], coefficients_S[members], version
            ),
            samples_S=tuple(places[i] for i in members),
        )
        if (members := list(chosen))
        else _filler(samples[shortest], version)
        for chosen in own
    ]
    return tuple(replace(one, is_silent=place < num_silent) for place, one in enumerate(made))


def _filler(sample: BatchSample, version: int) -> MicroBatch:
    """Something to run through the model whose gradient is exactly zero."""
    no_advantage_N = np.zeros(sample.trajectory.num_sampled, np.float32)
    return replace(_micro_batch([sample], [no_advantage_N], np.zeros(1), version), is_dummy=True)


def _micro_batch(
    samples: Sequence[BatchSample], advantages_SN: Sequence[np.ndarray], coefficients_S: np.ndarray, version: int
) -> MicroBatch:
    trajectories = [sample.trajectory for sample in samples]
    packed = PackedSequences.build([t.tokens_T for t in trajectories], [t.loss_mask_T for t in trajectories])
    sequence_N = packed.sequence_N.numpy()
    is_cut_S = np.array([t.finish_reason == "length" for t in trajectories])
    versions_N = np.concatenate([t.versions_T[t.loss_mask_T] for t in trajectories])
    inputs = TokenInputs(
        behaviour_N=torch.from_numpy(np.concatenate([t.logprobs_T[t.loss_mask_T] for t in trajectories])),
        advantage_N=_float32(np.concatenate(advantages_SN)),
        staleness_N=_float32(version - versions_N),
        coefficient_N=_float32(coefficients_S[sequence_N]),
        is_cut_N=torch.from_numpy(is_cut_S[sequence_N]),
    )
    return MicroBatch(packed, inputs)


def _dealing_metrics(
    lengths: Sequence[int],
    shares: Sequence[Sequence[int]],
    parts: Sequence[tuple[list[list[list[int]]], int]],
    capacity: int,
) -> dict[str, float]:
    """micro_batches: of one rank. forward_only_share: of the tokens, those without a backward pass. rank_imbalance: by
    how much the fullest rank's tokens exceed the mean, summed over mini-batches, since ranks wait for each other at the
    end of each."""
    num_ranks = len(parts[0][0])
    num_micro = sum(len(ranks[0]) for ranks, _ in parts)
    fullest = silent = 0
    for members, (ranks, num_silent) in zip(shares, parts, strict=True):
        tokens = [[sum(lengths[members[i]] for i in chosen) for chosen in own] for own in ranks]
        fullest += max(map(sum, tokens))
        silent += sum(sum(own[:num_silent]) for own in tokens)
    return {
        "micro_batches": float(num_micro),
        "forward_only_share": silent / sum(lengths),
        "packing_efficiency": sum(lengths) / (num_micro * num_ranks * capacity),
        "rank_imbalance": fullest * num_ranks / sum(lengths) - 1.0,
    }


def _float32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _batch_metrics(
    samples: Sequence[BatchSample],
    rewards_B: np.ndarray,
    found_advantages: np.ndarray,
    version: int,
    settings: TrainerSettings,
) -> dict[str, float]:
    """What can be said of the batch before training on it. Rewards are raw; staleness is per sampled token."""
    responses_B = np.asarray([sample.trajectory.num_sampled for sample in samples])
    staleness = np.concatenate([version - s.trajectory.versions_T[s.trajectory.loss_mask_T] for s in samples])
    group_ids = np.asarray([sample.group_id for sample in samples])
    return {
        "reward_mean": float(rewards_B.mean()),
        "reward_std": float(rewards_B.std()),
        "reward_shaped_mean": float(shaped_rewards(rewards_B, settings.advantage).mean()),
        "advantage_abs_mean": float(np.abs(found_advantages).mean()),
        "groups": float(len(np.unique(group_ids))),
        "sequences": float(len(samples)),
        "tokens": float(sum(len(sample.trajectory) for sample in samples)),
        "tokens_sampled": float(responses_B.sum()),
        "response_len_mean": float(responses_B.mean()),
        "response_len_p50": float(np.percentile(responses_B, 50)),
        "response_len_p99": float(np.percentile(responses_B, 99)),
        "response_len_max": float(responses_B.max()),
        "cut_share": float(np.mean([sample.trajectory.finish_reason == "length" for sample in samples])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }
