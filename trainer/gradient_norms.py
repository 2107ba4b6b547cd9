"""Norms of the gradients of single samples' log-probs, for advantages that need them (objectives/advantages/).

Only one rank is supported: ranks add their gradients, and a norm belongs to one sample.

Shapes: B samples of the batch.
"""

from __future__ import annotations

import numpy as np

from trainer.backends.port import Backend
from trainer.data.batch import PreparedBatch
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks


def square_norms(prepared: PreparedBatch, policy: Backend, ranks: Ranks) -> np.ndarray:
    """Compute |grad of sum log-prob|^2 of each sample, over the sampled tokens of all its trajectories; float64 [B].

    Runs a backward pass for each trajectory. A sample whose group has equal rewards has no advantage whatever its norm,
    so no pass is run and its norm is set to 1. Gradients are reset afterwards.
    """
    assert ranks.size == 1, "validate refuses more ranks"
    rewards = prepared.rewards
    packed_Q = _by_place(prepared)
    ends_B = np.cumsum([len(lengths) for lengths in rewards.trajectory_lengths_B])
    found_B = np.ones(len(ends_B))
    policy.zero_grad()
    for sample, end in enumerate(ends_B):
        is_member_B = rewards.group_ids_B == rewards.group_ids_B[sample]
        if np.ptp(rewards.rewards_B[is_member_B]) == 0:
            continue
        first = end - len(rewards.trajectory_lengths_B[sample])
        for place in range(first, end):
            logprobs_N, _ = policy.logprobs(packed_Q[place].to(ranks.device), with_entropy=False)
            policy.backward(logprobs_N.sum(), is_last=place == end - 1)
        found_B[sample] = sum(float(one.double().square().sum()) for one in policy.own_gradients().values())
        policy.zero_grad()
    return found_B


def _by_place(prepared: PreparedBatch) -> dict[int, PackedSequences]:
    """Pack each trajectory of the batch separately."""
    return {
        place: micro_batch.packed.subset([number])[0]
        for mini_batch in prepared.mini_batches
        for micro_batch in mini_batch
        for number, place in enumerate(micro_batch.places_S)
    }
