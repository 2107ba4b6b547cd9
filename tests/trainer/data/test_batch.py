"""Claims about a prepared batch: which numbers stand by which token, what is silent, and what is said of the batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.messages import BatchSample
from trainer.config import TrainerSettings
from trainer.data.batch import prepare_batch, split
from trainer.data.dealing import deal, deal_apart, micro_batches
from trainer.objectives.advantage import advantages, spread
from trainer.objectives.aggregation import token_coefficients


def settings(**changes: Any) -> TrainerSettings:
    return TrainerSettings(**{"micro_batch_tokens": 1000, "mini_batches": 1, **changes})


def sample(group_id: int, index: int, versions: list[int], reward: float, finish: Any = "stop") -> BatchSample:
    """A prompt of two tokens, then one sampled token of each version; log-probs tell sample and place."""
    length = len(versions)
    answer = Segment(
        np.arange(10, 10 + length, dtype=np.int32),
        -(10.0 * index + np.arange(1, length + 1)).astype(np.float32),
        np.asarray(versions, np.int32),
    )
    return BatchSample(
        group_id=group_id, sample_index=index, reward=reward,
        trajectory=Trajectory.from_prompt(np.asarray([3, 4], np.int32), answer, finish),
    )  # fmt: skip


BATCH = [
    sample(0, 0, [5, 5, 6], 1.0), sample(0, 1, [4, 7], 0.0, "length"), sample(1, 2, [7], 2.0),
    sample(1, 3, [3, 3, 3, 3], 2.0),
]  # fmt: skip


LENGTHS = [sample_.trajectory.num_sampled for sample_ in BATCH]
GROUPS = np.asarray([sample_.group_id for sample_ in BATCH])
REWARDS = np.asarray([sample_.reward for sample_ in BATCH])


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("micro_batch_tokens", [1000, 6])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean"])
def test_each_token_has_the_numbers_of_its_own_sample_and_place(
    aggregation: str, micro_batch_tokens: int, mini_batches: int
) -> None:
    chosen = settings(
        micro_batch_tokens=micro_batch_tokens, mini_batches=mini_batches, loss={"aggregation": aggregation}
    )
    prepared = prepare_batch(BATCH, 7, chosen)
    wanted_advantages = advantages(REWARDS, GROUPS, LENGTHS, chosen.advantage)
    wanted_coefficients = token_coefficients(LENGTHS, GROUPS.tolist(), chosen.loss, num_updates=mini_batches)
    seen = []
    for micro_batch in (one for mini_batch in prepared.mini_batches for one in mini_batch):
        inputs, which_N = micro_batch.inputs, micro_batch.packed.sequence_N
        assert not micro_batch.is_dummy
        assert len(micro_batch.places_S) == len(micro_batch.packed.lengths)
        for place, index in enumerate(micro_batch.places_S):
            own, trajectory = which_N == place, BATCH[index].trajectory
            seen.append(index)
            assert micro_batch.packed.lengths[place] == len(trajectory)
            assert inputs.behaviour_N[own].tolist() == trajectory.logprobs_T[trajectory.loss_mask_T].tolist()
            versions = trajectory.versions_T[trajectory.loss_mask_T]
            assert inputs.staleness_N[own].tolist() == [7.0 - version for version in versions]
            assert inputs.is_cut_N is not None
            assert inputs.is_cut_N[own].tolist() == [trajectory.finish_reason == "length"] * len(versions)
            assert set(inputs.advantage_N[own].tolist()) == {np.float32(wanted_advantages[index])}
            assert set(inputs.coefficient_N[own].tolist()) == {np.float32(wanted_coefficients[index])}
    assert sorted(seen) == [0, 1, 2, 3]
    assert len(prepared.mini_batches) == mini_batches
    assert (prepared.version, prepared.step) == (7, 8)


def test_advantages_of_tokens_stand_by_their_tokens() -> None:
    chosen = settings(advantage={"kind": "reinforce_pp"}, micro_batch_tokens=6)
    found_advantages = advantages(REWARDS, GROUPS, LENGTHS, chosen.advantage)
    wanted = spread(found_advantages, [(length,) for length in LENGTHS])
    for micro_batch in prepare_batch(BATCH, 7, chosen).mini_batches[0]:
        for place, index in enumerate(micro_batch.places_S):
            own = micro_batch.packed.sequence_N == place
            assert micro_batch.inputs.advantage_N[own].tolist() == wanted[index].tolist()


def test_what_advantages_are_computed_from_comes_along_for_the_whole_batch() -> None:
    for rank in range(2):
        rewards = prepare_batch(BATCH, 7, settings(), rank=rank, num_ranks=2).rewards
        assert rewards.rewards_B.tolist() == REWARDS.tolist()
        assert rewards.group_ids_B.tolist() == GROUPS.tolist()
        assert rewards.lengths_B == tuple(LENGTHS)


def test_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        prepare_batch([], 7, settings())


def test_metrics_are_about_the_whole_batch() -> None:
    shaped = {"reward_bias": 1.0, "reward_scale": 0.5}
    metrics = prepare_batch(BATCH, 7, settings(advantage={"kind": "grpo_no_std", **shaped})).metrics
    lengths, staleness = [3, 2, 1, 4], [2, 2, 1, 3, 0, 0, 4, 4, 4, 4]
    assert {
        "reward_mean": 1.25, "reward_std": pytest.approx(np.std([1, 0, 2, 2])), "groups": 2.0, "sequences": 4.0,
        "tokens": 18.0, "tokens_sampled": 10.0, "response_len_mean": 2.5, "response_len_p50": 2.5,
        "response_len_p99": pytest.approx(np.percentile(lengths, 99)), "response_len_max": 4.0, "cut_share": 0.25,
        "staleness_mean": np.mean(staleness), "staleness_max": 4.0, "micro_batches": 1.0,
        "packing_efficiency": pytest.approx(18 / 1000), "rank_imbalance": 0.0,
        "reward_shaped_mean": 1.125, "advantage_abs_mean": pytest.approx(0.125),
    }.items() <= metrics.items()  # fmt: skip


def test_rewards_are_those_of_new_samples() -> None:
    reused = msgspec.structs.replace(BATCH[0], is_reused=True)
    metrics = prepare_batch([reused, *BATCH[1:]], 7, settings()).metrics
    others = REWARDS[1:]
    assert (metrics["reward_mean"], metrics["reward_std"]) == (
        pytest.approx(others.mean()),
        pytest.approx(others.std()),
    )
    assert metrics["reused_samples"] == 1.0
    assert metrics["sequences"] == 4.0
    assert "reused_samples" not in prepare_batch(BATCH, 7, settings()).metrics


def test_imbalance_is_what_the_fullest_rank_has_more_than_the_mean() -> None:
    samples = [sample(0, 0, [7] * 8, 1.0), sample(0, 1, [7] * 3, 0.0)]
    metrics = prepare_batch(samples, 7, settings(), num_ranks=2).metrics
    assert metrics["rank_imbalance"] == pytest.approx(10 * 2 / 15 - 1)
    assert metrics["packing_efficiency"] == pytest.approx(15 / (1 * 2 * 1000))


@pytest.mark.parametrize(
    ("loss", "is_silent"),
    [
        ({}, True), ({"kl_coef": 0.1}, False), ({"entropy_coef": 0.1}, False),
        ({"kl_coef": 0.1, "entropy_coef": 0.1}, False), ({"kind": "own_losses:loss"}, False),
        ({"kind": "own_losses:loss", "kl_coef": 0.1}, False), ({"kind": "own_losses:loss", "entropy_coef": 0.1}, False),
    ],
)  # fmt: skip
def test_sequence_is_silent_only_where_nothing_but_its_advantage_makes_a_gradient(
    loss: Any, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of the user's own may have a gradient anywhere."""
    own_losses = ModuleType("own_losses")
    own_losses.loss = lambda logprobs_N, tokens: -logprobs_N  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_losses", own_losses)
    chosen = settings(micro_batch_tokens=6)
    changed = chosen.model_copy(update={"loss": chosen.loss.model_copy(update=loss)})
    prepared = prepare_batch(BATCH, 7, changed)
    assert any(one.is_silent for one in prepared.mini_batches[0]) is is_silent
    for one in prepared.mini_batches[0]:
        assert not one.is_silent or not one.inputs.advantage_N.any()
    assert (prepared.metrics["forward_only_share"] > 0) is is_silent


def test_share_without_a_backward_pass_is_counted_in_tokens() -> None:
    assert prepare_batch(BATCH, 7, settings(micro_batch_tokens=6)).metrics["forward_only_share"] == pytest.approx(
        9 / 18
    )


def test_silent_sequences_of_a_mini_batch_are_its_own() -> None:
    """Group 1 has no advantage: its mini-batch has no gradient, and still a backward pass, as an update wants one."""
    prepared = prepare_batch(BATCH, 7, settings(micro_batch_tokens=6, mini_batches=2))
    assert not any(one.is_silent for mini_batch in prepared.mini_batches for one in mini_batch)
    assert prepared.metrics["forward_only_share"] == 0.0
    assert prepared.metrics["micro_batches"] == 4.0


def test_batch_on_another_device_is_the_same_there() -> None:
    ((micro_batch,),) = prepare_batch(BATCH, 7, settings()).mini_batches
    assert micro_batch.to(torch.device("cpu")) is micro_batch
    moved = replace(micro_batch, is_silent=True).to(torch.device("meta"))
    assert moved.packed.tokens_T.device.type == "meta"
    for name, value in vars(micro_batch.inputs).items():
        if isinstance(value, torch.Tensor):
            assert getattr(moved.inputs, name).device.type == "meta", name
    assert moved.is_silent


def test_company_of_a_rank_without_sequences_is_the_shortest_one_and_counts_for_nothing() -> None:
    prepared = prepare_batch(BATCH[:2], 7, settings(), rank=0, num_ranks=3)
    others = [prepare_batch(BATCH[:2], 7, settings(), rank=rank, num_ranks=3) for rank in (1, 2)]
    (filler,) = [one for made in (prepared, *others) for one in made.mini_batches[0] if one.is_dummy]
    assert list(filler.packed.lengths) == [4]
    assert not filler.inputs.advantage_N.any()
    assert not filler.inputs.coefficient_N.any()


# ---------------------------------------------------------------- who shares what


@pytest.mark.parametrize(
    ("group_ids", "num", "shares"),
    [
        ([0, 0, 1, 1], 1, [[0, 1, 2, 3]]), ([0, 0, 1, 1], 2, [[0, 1], [2, 3]]), ([0, 0, 0, 0], 4, [[0], [1], [2], [3]]),
        ([0, 1], 5, [[0], [1]]), ([0, 1, 0, 1], 2, [[0, 2], [1, 3]]),
    ],
)  # fmt: skip
def test_groups_stay_whole_while_there_are_enough_of_them(group_ids: Any, num: int, shares: Any) -> None:
    assert sorted(split([5] * len(group_ids), group_ids, num)) == shares


def test_micro_batch_may_be_just_full_and_a_longer_sequence_has_one_alone() -> None:
    assert micro_batches([6, 4, 10], 10) in ([[0, 1], [2]], [[2], [0, 1]])
    assert micro_batches([11, 4, 12], 10) == [[0], [2], [1]]
    assert micro_batches([11], 10) == [[0]]


def test_rank_with_too_few_micro_batches_halves_its_fullest() -> None:
    assert [[len(members) for members in own] for own in deal([10, 3, 3, 3], 1, 10)] == [[1, 3]]
    by_rank = [[len(members) for members in own] for own in deal([10, 9, 5, 5, 5, 4], 2, 10)]
    assert len({len(own) for own in by_rank}) == 1
    assert sum(map(sum, by_rank)) == 6
    assert deal([10], 3, 10) in ([[[0]], [[]], [[]]], [[[]], [[0]], [[]]], [[[]], [[]], [[0]]])


@pytest.mark.parametrize(
    ("lengths", "silent", "num_silent"),
    [
        ([10, 10, 10], [True, True, False], 2), ([5, 5], [True, False], 0),  # together they are one micro-batch
        ([10, 10], [False, False], 0), ([10, 10], [True, True], 0), ([5, 5, 10], [True, False, True], 2),
    ],
)  # fmt: skip
def test_silent_sequences_are_apart_only_where_that_saves_passes(lengths: Any, silent: Any, num_silent: int) -> None:
    found, num = deal_apart(lengths, silent, 1, 10)
    assert sorted(i for own in found for members in own for i in members) == list(range(len(lengths)))
    assert num == num_silent
    if num:
        assert all(silent[i] for members in found[0][:num] for i in members)
        assert not any(silent[i] for members in found[0][num:] for i in members)
