"""Prepares a batch of samples for training: advantages, mini-batches, packed micro-batches, denominators.

It uses neither the model nor a device other than the CPU, so that it may run in another thread in the background of
the previous step. It is a pure function of its arguments: same samples, same bits.

With several ranks each prepares the same batch and keeps its own part: advantages, mini-batches and denominators are
those of the whole batch, on every rank. How a batch is split into mini-batches, micro-batches and ranks does not change
a sequence's weight in the step. The trajectories of a sample are distributed individually, after its advantage and its
weight are computed.

Shapes: B samples of the batch, Q trajectories of all of them (Q = B unless samples have several), S sequences of a
mini-batch or a micro-batch: each is one trajectory; N sampled tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from areal_like.packing import partition
from areal_like.trajectory import Trajectory
from areal_like.wire.messages import BatchSample
from trainer.config import TrainerSettings
from trainer.data.dealing import deal_apart
from trainer.data.teacher import teacher_logprobs
from trainer.model.packed import PackedSequences
from trainer.objectives.advantage import advantages, shaped_rewards, spread
from trainer.objectives.aggregation import token_coefficients
from trainer.objectives.port import TokenInputs, TurnRewards
from trainer.objectives.registry import advantage_of, loss_of


@dataclass(frozen=True)
class MicroBatch:
    """Sequences whose forward and backward passes run together, and the loss inputs of their N sampled tokens.

    places_S: the place of each sequence among the batch's trajectories.
    is_dummy: its sequence belongs to another micro-batch and does not count: the pass only serves the collectives of
    other ranks.
    is_copy: another rank of the sequence group has the same one, and counts it.
    is_silent: its gradient is zero, because no token has an advantage: it only needs a forward pass, for the metrics.
    """

    packed: PackedSequences
    inputs: TokenInputs
    places_S: tuple[int, ...] = ()
    is_dummy: bool = False
    is_copy: bool = False
    is_silent: bool = False

    @property
    def is_counted(self) -> bool:
        """True if this rank adds it to sums over the batch."""
        return not self.is_dummy and not self.is_copy

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on `device`, or self if it is there already."""
        if self.inputs.behaviour_N.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self.inputs).items()
            if isinstance(value, torch.Tensor)
        }
        if (recalled := self.inputs.recalled) is not None:
            tensors: dict[str, Any] = {
                name: value.to(device, non_blocking=True)
                for name, value in vars(recalled).items()
                if isinstance(value, torch.Tensor)
            }
            moved["recalled"] = replace(recalled, **tensors)
        return replace(self, packed=self.packed.to(device), inputs=replace(self.inputs, **moved))


@dataclass(frozen=True)
class BatchRewards:
    """The inputs of advantages, of the whole batch: raw rewards, groups, sampled tokens of each trajectory.

    turn_starts_N: bool, the sampled tokens, in the order of the trajectories, that begin a turn. is_cut_Q: bool,
    truncated at the token limit. turns_B: rewards by turn, None for a sample without them. teacher_N: float64,
    log-probs of the sampled tokens under a teacher of the rollout workers; None: there is none.
    """

    rewards_B: np.ndarray
    group_ids_B: np.ndarray
    trajectory_lengths_B: tuple[tuple[int, ...], ...]
    turn_starts_N: np.ndarray
    is_cut_Q: np.ndarray
    turns_B: tuple[TurnRewards | None, ...]
    teacher_N: np.ndarray | None = None

    @staticmethod
    def of(samples: Sequence[BatchSample], teacher_model: str = "") -> BatchRewards:
        """Collect the rewards of `samples`, and log-probs of the teacher of this name. Raises UserError if a sample has
        none.
        """
        return BatchRewards(
            rewards_B=np.asarray([sample.reward for sample in samples], np.float64),
            group_ids_B=np.asarray([sample.group_id for sample in samples], np.int64),
            trajectory_lengths_B=tuple(tuple(one.num_sampled for one in sample.trajectories) for sample in samples),
            turn_starts_N=np.concatenate([_turn_starts(one) for sample in samples for one in sample.trajectories]),
            is_cut_Q=np.array([one.finish_reason == "length" for sample in samples for one in sample.trajectories]),
            turns_B=tuple(_turns_of(sample.trajectories) for sample in samples),
            teacher_N=teacher_logprobs(samples, teacher_model) if teacher_model else None,
        )

    @property
    def lengths_B(self) -> tuple[int, ...]:
        """Sampled tokens of each sample."""
        return tuple(map(sum, self.trajectory_lengths_B))

    @property
    def lengths_Q(self) -> tuple[int, ...]:
        """Sampled tokens of each trajectory."""
        return tuple(length for lengths in self.trajectory_lengths_B for length in lengths)


@dataclass(frozen=True)
class PreparedBatch:
    """The input of `TrainStep.run`. `version` is the policy's at the start of the step: n - 1 in step n.

    tokens_of_version: sampled tokens of the whole batch by the version that sampled them.
    """

    version: int
    mini_batches: tuple[tuple[MicroBatch, ...], ...]
    metrics: dict[str, float]
    rewards: BatchRewards
    tokens_of_version: Mapping[int, int]

    @property
    def step(self) -> int:
        """The step of this batch."""
        return self.version + 1


def prepare_batch(
    samples: Sequence[BatchSample],
    version: int,
    settings: TrainerSettings,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    is_copy: bool = False,
) -> PreparedBatch:
    """Pack the part of `samples` that belongs to `rank`, for the step that starts from policy `version`.

    A sequence group counts as one rank; is_copy: another rank of it counts the part.

    Advantages, denominators and metrics are those of the whole batch. Advantages that need a model's passes, such
    as a critic's values, are set to 0 (see trainer/step_advantages.py). Raises ValueError for an empty batch, UserError
    if a sample lacks the log-probs of a teacher.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample")
    trajectories_Q = [one for sample in samples for one in sample.trajectories]
    lengths = [len(one) for one in trajectories_Q]
    rewards = BatchRewards.of(samples, settings.teacher_model)
    group_ids_B, lengths_B = rewards.group_ids_B, rewards.lengths_B
    num_trajectories_B = [len(sample.trajectories) for sample in samples]
    is_later = settings.critic is not None or advantage_of(settings.advantage)[0].needs_starts
    if is_later:
        found_advantages = np.zeros(len(samples), np.float32)
    else:
        found_advantages = advantages(
            rewards.rewards_B, group_ids_B, lengths_B, settings.advantage, turns_B=rewards.turns_B,
            trajectory_lengths_B=rewards.trajectory_lengths_B,
        )  # fmt: skip
    advantages_QN = spread(found_advantages, rewards.trajectory_lengths_B)
    shares = split(lengths, np.repeat(group_ids_B, num_trajectories_B).tolist(), settings.mini_batches)
    coefficients_B = token_coefficients(lengths_B, group_ids_B.tolist(), settings.loss, num_updates=len(shares))
    coefficients_Q = np.repeat(coefficients_B, num_trajectories_B)
    may_be_silent = not is_later and not loss_of(settings.loss).needs.every_sequence
    is_silent_Q = np.array([may_be_silent and not advantages_N.any() for advantages_N in advantages_QN])
    parts = [
        deal_apart([lengths[i] for i in members], is_silent_Q[members].tolist(), num_ranks, settings.micro_batch_tokens)
        for members in shares
    ]
    mini_batches = tuple(
        _mini_batch(
            [trajectories_Q[i] for i in members],
            [advantages_QN[i] for i in members],
            coefficients_Q[members],
            version,
            dealt[rank],
            num_silent,
            members,
            is_copy=is_copy,
            is_replayed=settings.router_replay,
        )
        for members, (dealt, num_silent) in zip(shares, parts, strict=True)
    )
    metrics = _batch_metrics(samples, rewards, found_advantages, version, settings)
    if settings.router_replay:
        replayed = sum(len(one) for one in trajectories_Q if one.routed_experts is not None)
        metrics["replayed_share"] = replayed / sum(lengths)
    metrics |= _dealing_metrics(lengths, shares, parts, settings.micro_batch_tokens)
    versions, counts = np.unique(
        np.concatenate([one.versions_T[one.loss_mask_T] for one in trajectories_Q]), return_counts=True
    )
    tokens_of_version = dict(zip(versions.tolist(), counts.tolist(), strict=True))
    return PreparedBatch(version, mini_batches, metrics, rewards, tokens_of_version)


def _turn_starts(trajectory: Trajectory) -> np.ndarray:
    """Return the sampled tokens that begin a turn, bool: after given tokens, and after a turn that has a reward."""
    mask_T = trajectory.loss_mask_T
    starts_N: np.ndarray = ~mask_T[:-1][mask_T[1:]]  # the first token of a sequence is never sampled
    if trajectory.turn_ends_K is not None:
        starts_N[trajectory.turn_ends_K[:-1]] = True  # there are no given tokens between two turns
    return starts_N


def _turns_of(trajectories: Sequence[Trajectory]) -> TurnRewards | None:
    """Return the turns of a sample, its trajectories concatenated. If only some trajectories have rewards by turn, the
    others are a turn of reward 0."""
    if all(one.turn_ends_K is None for one in trajectories):
        return None
    ends, rewards, done = [], [], 0
    for one in trajectories:
        ends_K, rewards_K = one.turn_ends_K, one.turn_rewards_K
        if ends_K is None or rewards_K is None:
            ends_K, rewards_K = np.array([one.num_sampled], np.int32), np.zeros(1, np.float32)
        ends.append(done + ends_K)
        rewards.append(rewards_K)
        done += one.num_sampled
    return TurnRewards(np.concatenate(ends), np.concatenate(rewards))


def split(lengths: Sequence[int], group_ids: Sequence[int], num: int) -> list[list[int]]:
    """Return the indices of the sequences in at most `num` mini-batches of nearly equal tokens.

    Groups are kept together if there are enough of them, otherwise sequences are distributed individually. None is
    empty: with fewer sequences than `num` there are fewer mini-batches.
    """
    units: dict[int, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        units.setdefault(group_id, []).append(index)
    members = list(units.values()) if len(units) >= num else [[index] for index in range(len(lengths))]
    shares = partition([sum(lengths[i] for i in unit) for unit in members], min(num, len(members)))
    return [sorted(i for unit in share for i in members[unit]) for share in shares]


def _mini_batch(
    trajectories: Sequence[Trajectory],
    advantages_SN: Sequence[np.ndarray],
    coefficients_S: np.ndarray,
    version: int,
    own: Sequence[Sequence[int]],
    num_silent: int,
    places: Sequence[int],
    *,
    is_copy: bool = False,
    is_replayed: bool = False,
) -> tuple[MicroBatch, ...]:
    """Create the micro-batches `own` (indices of `trajectories`); the first `num_silent` have no gradient.

    places: indices of `trajectories` in the batch.
    """
    shortest = min(trajectories, key=len)
    made = [
        replace(
            _micro_batch(
                [trajectories[i] for i in members],
                [advantages_SN[i] for i in members],
                coefficients_S[members],
                version,
                is_replayed=is_replayed,
            ),
            places_S=tuple(places[i] for i in members),
        )
        if (members := list(chosen))
        else _filler(shortest, version)
        for chosen in own
    ]
    return tuple(replace(one, is_silent=place < num_silent, is_copy=is_copy) for place, one in enumerate(made))


def _filler(trajectory: Trajectory, version: int) -> MicroBatch:
    """Create a dummy micro-batch, whose gradient is exactly zero."""
    no_advantage_N = np.zeros(trajectory.num_sampled, np.float32)
    return replace(_micro_batch([trajectory], [no_advantage_N], np.zeros(1), version), is_dummy=True)


def _micro_batch(
    trajectories: Sequence[Trajectory],
    advantages_SN: Sequence[np.ndarray],
    coefficients_S: np.ndarray,
    version: int,
    *,
    is_replayed: bool = False,
) -> MicroBatch:
    packed = PackedSequences.build(
        [t.tokens_T for t in trajectories],
        [t.loss_mask_T for t in trajectories],
        [t.routed_experts for t in trajectories] if is_replayed else None,
    )
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
    """Compute metrics of the distribution. micro_batches: of one rank. forward_only_share: share of the tokens without
    a backward pass. rank_imbalance: by how much the fullest rank's tokens exceed the mean, summed over mini-batches,
    because ranks wait for each other at the end of each."""
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
    rewards: BatchRewards,
    found_advantages: np.ndarray,
    version: int,
    settings: TrainerSettings,
) -> dict[str, float]:
    """Compute the batch's metrics before training on it. Rewards are raw; staleness is per sampled token; lengths and
    turns are of samples, with all their trajectories; `sequences` are trajectories."""
    trajectories = [one for sample in samples for one in sample.trajectories]
    rewards_B, responses_B = rewards.rewards_B, np.asarray(rewards.lengths_B)
    is_new_B = np.asarray([not sample.is_reused for sample in samples])
    reused = {} if is_new_B.all() else {"reused_samples": float((~is_new_B).sum())}
    new_rewards_B = rewards_B[is_new_B]  # a curve of the policy's rewards shows each sample once
    turns_B = np.asarray([sum(one.num_turns for one in sample.trajectories) for sample in samples])
    staleness = np.concatenate([version - one.versions_T[one.loss_mask_T] for one in trajectories])
    return reused | {
        "reward_mean": float(new_rewards_B.mean()),
        "reward_std": float(new_rewards_B.std()),
        "reward_shaped_mean": float(shaped_rewards(rewards_B, settings.advantage).mean()),
        "advantage_abs_mean": float(np.abs(found_advantages).mean()),
        "groups": float(len(np.unique(rewards.group_ids_B))),
        "sequences": float(len(trajectories)),
        "trajectories_per_sample": len(trajectories) / len(samples),
        "turns_mean": float(turns_B.mean()),
        "turns_max": float(turns_B.max()),
        "tokens": float(sum(map(len, trajectories))),
        "tokens_sampled": float(responses_B.sum()),
        "response_len_mean": float(responses_B.mean()),
        "response_len_p50": float(np.percentile(responses_B, 50)),
        "response_len_p99": float(np.percentile(responses_B, 99)),
        "response_len_max": float(responses_B.max()),
        "cut_share": float(np.mean([sample.trajectory.finish_reason == "length" for sample in samples])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
    }
