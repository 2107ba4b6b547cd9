"""A sample of several trajectories weighs as one sample, and trains as the same tokens in a single trajectory do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_like.trajectory import NO_VERSION, Trajectory
from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, LossSettings, OptimizerSettings, TrainerSettings
from trainer.data.batch import BatchRewards, PreparedBatch, prepare_batch
from trainer.model.attention import AttentionChoice
from trainer.objectives.advantage import advantages, advantages_of, rewarded, targets_of
from trainer.objectives.port import TurnRewards
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model
from trainer.step_advantages import step_advantages

AGGREGATIONS = ("token_mean", "sequence_mean", "group_mean", "constant")
GROUPS = (4, 3, 4, 1, 2)
DIVISOR = 8.0


def cut(sample: BatchSample, ends: Sequence[int]) -> BatchSample:
    """The sample as trajectories that each see all tokens before, and train those up to the next of `ends`."""
    whole, parts, start = sample.trajectory, [], 0
    places = np.flatnonzero(whole.loss_mask_T)
    for number, end in enumerate(ends):
        last = int(places[end - 1]) + 1
        mask_T = np.zeros(last, bool)
        mask_T[places[start:end]] = True
        turns: dict[str, Any] = {}
        if whole.turn_ends_K is not None and whole.turn_rewards_K is not None:
            is_own_K = (whole.turn_ends_K > start) & (whole.turn_ends_K <= end)
            turns = {
                "turn_ends_K": (whole.turn_ends_K[is_own_K] - start).astype(np.int32),
                "turn_rewards_K": whole.turn_rewards_K[is_own_K],
            }
        parts.append(
            Trajectory(
                tokens_T=whole.tokens_T[:last],
                loss_mask_T=mask_T,
                logprobs_T=np.where(mask_T, whole.logprobs_T[:last], np.float32(0)),
                versions_T=np.where(mask_T, whole.versions_T[:last], np.int32(NO_VERSION)),
                finish_reason=whole.finish_reason,
                answer_ends_A=np.array([end - start], np.int32),
                answer_ids_A=np.array([number], np.int32),
                **turns,
            )
        )
        start = end
    return msgspec.structs.replace(sample, trajectory=parts[0], others=tuple(parts[1:]))


def cut_all(samples: Sequence[BatchSample], seed: int) -> list[BatchSample]:
    """Each sample in one to four trajectories, by chance."""
    rng = np.random.default_rng(seed)
    result = []
    for sample in samples:
        num = sample.trajectory.num_sampled
        inner = np.flatnonzero(rng.random(num - 1) < 3 / max(num, 6)) + 1 if num > 1 else []
        result.append(cut(sample, [*map(int, inner), num]))
    return result


def settings_of(aggregation: Any = "token_mean", **changes: Any) -> TrainerSettings:
    loss = LossSettings(aggregation=aggregation, constant_divisor=DIVISOR)
    return TrainerSettings(**{"loss": loss, "optimizer": OptimizerSettings(lr=1e-2), **changes})


def trained(model: Any, samples: Sequence[BatchSample], settings: TrainerSettings) -> tuple[dict[str, float], Any]:
    """Metrics of one step, and the weights after it."""
    setup = Setup(
        settings, temperature=0.9, num_steps=10, attention=AttentionChoice("sdpa", "test"), ranks=Ranks.alone()
    )
    ready_model(model, setup)
    step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=len(GROUPS))
    metrics = step.run(step.prepare(samples, version=3))
    return metrics, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_is_the_same_however_many_trajectories_a_sample_is_cut_in(
    aggregation: Any, seed: int, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, settings = make_samples(GROUPS), settings_of(aggregation)
    parts = cut_all(samples, seed)
    assert max(len(one.trajectories) for one in parts) >= 3
    whole, weights = trained(tiny_model(), samples, settings)
    found, cut_weights = trained(tiny_model(), parts, settings)
    assert abs(whole["loss"]) > 1e-3
    for name in ("loss", "grad_norm", "entropy", "weight_mean", "ess", "reward_mean", "response_len_mean"):
        assert found[name] == pytest.approx(whole[name], rel=1e-4), name
    assert found["trajectories_per_sample"] > 1.0 == whole["trajectories_per_sample"]
    assert max(float((a - b).abs().max()) for a, b in zip(weights, cut_weights, strict=True)) < 1e-4


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_step_on_single_trajectories_has_the_same_bits_whether_their_answers_are_known(
    mini_batches: int, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, settings = make_samples(GROUPS), settings_of("sequence_mean", mini_batches=mini_batches)
    known = [cut(sample, [sample.trajectory.num_sampled]) for sample in samples]
    metrics, weights = trained(tiny_model(), samples, settings)
    others, other_weights = trained(tiny_model(), known, settings)
    assert metrics == others
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def weights_of_samples(samples: Sequence[BatchSample], settings: TrainerSettings, num_ranks: int) -> list[float]:
    """Sum of the token weights of each sample's trajectories, over updates, micro-batches and ranks."""
    owner = [place for place, sample in enumerate(samples) for _ in sample.trajectories]
    found: dict[int, float] = defaultdict(float)
    seen: list[int] = []
    for rank in range(num_ranks):
        prepared = prepare_batch(samples, 3, settings, rank=rank, num_ranks=num_ranks)
        for mini_batch in prepared.mini_batches:
            for one in mini_batch:
                for number, place in enumerate(one.places_S):
                    weight = float(one.inputs.coefficient_N[one.packed.sequence_N == number].double().sum())
                    found[owner[place]] += weight / len(prepared.mini_batches)
                seen += one.places_S
    assert sorted(seen) == list(range(len(owner))), "each trajectory is dealt once"
    return [found[place] for place in range(len(samples))]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_forks_give_a_sample_no_more_weight_however_its_trajectories_are_dealt(
    aggregation: Any, make_samples: Any
) -> None:
    samples = make_samples(GROUPS)
    lengths = np.array([sample.trajectory.num_sampled for sample in samples], np.float64)
    groups = np.array([sample.group_id for sample in samples])
    expected = {  # from the definition, with whole samples
        "token_mean": lengths / lengths.sum(),
        "sequence_mean": np.full(len(lengths), 1 / len(lengths)),
        "group_mean": lengths / [lengths[groups == group].sum() for group in groups] / len(GROUPS),
        "constant": lengths / (len(lengths) * DIVISOR),
    }[aggregation]
    for seed in range(3):
        parts = cut_all(samples, seed)
        for mini_batches in (1, 2, 4):
            for micro_batch_tokens in (20, 10_000):
                settings = settings_of(aggregation, mini_batches=mini_batches, micro_batch_tokens=micro_batch_tokens)
                for num_ranks in (1, 2, 3):
                    found = weights_of_samples(parts, settings, num_ranks)
                    np.testing.assert_allclose(found, expected, rtol=1e-5)


def by_token(prepared: PreparedBatch, samples: Sequence[BatchSample], name: str = "advantage_N") -> dict[Any, float]:
    """A number of each sampled token, by group, sample and number of the sampled token in its sample."""
    trajectories = [
        (sample.group_id, sample.sample_index, sum(one.num_sampled for one in sample.trajectories[:place]))
        for sample in samples
        for place in range(len(sample.trajectories))
    ]
    found = {}
    for one in (one for mini_batch in prepared.mini_batches for one in mini_batch):
        values_N = getattr(one.inputs, name)
        for number, place in enumerate(one.places_S):
            group_id, index, start = trajectories[place]
            own = values_N[one.packed.sequence_N == number].tolist()
            found |= {(group_id, index, start + token): value for token, value in enumerate(own)}
    return found


@pytest.mark.parametrize(
    "kind", ["grpo", "grpo_no_std", "rloo", "global_norm", "lite_ppo", "reinforce_pp_baseline", "turns"]
)
def test_all_trajectories_of_a_sample_have_the_advantages_of_its_tokens_in_one(kind: Any, make_samples: Any) -> None:
    samples = []
    for sample in make_samples(GROUPS, max_answer=9):
        num = sample.trajectory.num_sampled
        ends = np.unique([*range(2, num, 3), num]).astype(np.int32)
        rewards = (ends % 4).astype(np.float32)
        turns = {"turn_ends_K": ends, "turn_rewards_K": rewards}
        trajectory = msgspec.structs.replace(sample.trajectory, **turns)
        samples.append(msgspec.structs.replace(sample, trajectory=trajectory, reward=float(rewards.sum())))
    parts = [cut(sample, sample.trajectory.turn_ends_K.tolist()) for sample in samples]
    settings = settings_of(advantage=AdvantageSettings(kind=kind))
    whole, found = (by_token(prepare_batch(batch, 3, settings), batch) for batch in (samples, parts))
    assert len(set(whole.values())) > 3
    assert found == pytest.approx(whole)


def test_a_trajectory_without_rewards_by_turn_is_a_turn_of_reward_zero_among_others() -> None:
    def part(turns: dict[str, Any]) -> Trajectory:
        return Trajectory(
            tokens_T=np.arange(4, dtype=np.int32), loss_mask_T=np.array([False, True, True, True]),
            logprobs_T=np.zeros(4, np.float32), versions_T=np.array([-1, 0, 0, 0], np.int32), finish_reason="stop",
            **turns,
        )  # fmt: skip

    turns = {"turn_ends_K": np.array([1, 3], np.int32), "turn_rewards_K": np.array([0.5, 0.25], np.float32)}
    sample = BatchSample(group_id=0, sample_index=0, trajectory=part({}), others=(part(turns), part({})), reward=0.75)
    [found] = BatchRewards.of([sample]).turns_B
    assert found is not None
    assert (found.ends_K.tolist(), found.rewards_K.tolist()) == ([3, 4, 6, 9], [0.0, 0.5, 0.25, 0.0])


@given(seed=st.integers(0, 1000), has_penalties=st.booleans(), has_turns=st.booleans())
def test_by_trajectory_each_one_ends_in_the_samples_reward_minus_its_own_penalties(
    seed: int, has_penalties: bool, has_turns: bool
) -> None:
    rng = np.random.default_rng(seed)
    lengths_B = [tuple(rng.integers(1, 5, rng.integers(1, 4)).tolist()) for _ in range(4)]
    rewards_B, num = rng.normal(size=4), sum(map(sum, lengths_B))
    penalties_N = rng.random(num) if has_penalties else None
    turns_B: Any = ()
    if has_turns:  # one for each trajectory
        turns_B = [TurnRewards(np.cumsum(lengths), rng.normal(size=len(lengths))) for lengths in lengths_B]
    samples = rewarded(
        rewards_B, np.arange(4), list(map(sum, lengths_B)), AdvantageSettings(), penalties_N, turns_B, lengths_B
    )
    found = samples.by_trajectory()
    assert found.lengths_B.tolist() == [length for lengths in lengths_B for length in lengths]
    expected, start = np.zeros(num), 0
    for sample, lengths in enumerate(lengths_B):
        for place, length in enumerate(lengths):
            expected[start + length - 1] = turns_B[sample].rewards_K[place] if has_turns else rewards_B[sample]
            start += length
    expected = expected - (penalties_N if penalties_N is not None else 0.0)
    np.testing.assert_allclose(found.token_rewards_N(), expected, atol=1e-12)
    sums = np.add.reduceat(expected, np.cumsum([0, *found.lengths_B[:-1]]))
    if not has_turns:
        np.testing.assert_allclose(found.rewards_B, sums, atol=1e-12)


@pytest.mark.parametrize("kind", ["gae", "reinforce_pp"])
def test_what_looks_along_a_sequence_takes_each_trajectory_for_an_answer_of_its_own(
    kind: Any, make_samples: Any
) -> None:
    parts = cut_all(make_samples(GROUPS), 1)
    advantage = AdvantageSettings(kind=kind)
    rewards = BatchRewards.of(parts)
    alone = [
        msgspec.structs.replace(one, trajectory=trajectory, others=())
        for one in parts
        for trajectory in one.trajectories
    ]
    rng = np.random.default_rng(0)
    values_N, ends_Q = rng.normal(size=sum(rewards.lengths_B)), rng.normal(size=len(alone))

    def found(batch: Sequence[BatchSample]) -> tuple[np.ndarray, np.ndarray]:
        of = BatchRewards.of(batch)
        samples = replace(
            rewarded(
                of.rewards_B, of.group_ids_B, of.lengths_B, advantage, trajectory_lengths_B=of.trajectory_lengths_B
            ),
            values_N=values_N, end_values_Q=ends_Q, turn_starts_N=of.turn_starts_N, is_cut_Q=of.is_cut_Q,
        )  # fmt: skip
        return advantages_of(samples, advantage), targets_of(samples, advantage)

    for ours, theirs in zip(found(parts), found(alone), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class OtherRank:
    """Adds what another rank has."""

    device = torch.device("cpu")

    def __init__(self, others: torch.Tensor | None = None) -> None:
        self.others = others
        self.own = torch.zeros(0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.own = values
        return values if self.others is None else values + self.others


def test_penalties_of_a_samples_trajectories_meet_from_all_ranks(make_samples: Any) -> None:
    """`kl_in: reward` with the trajectories of a sample on different ranks gives the advantages of one rank."""
    loss = LossSettings(kl_coef=0.1, kl_in="reward")
    settings = settings_of(loss=loss, advantage=AdvantageSettings(kind="grpo_no_std"), micro_batch_tokens=30)
    parts = cut_all(make_samples(GROUPS), 2)

    def references(prepared: PreparedBatch) -> dict[tuple[int, int], torch.Tensor]:
        return {
            (number, place): -0.1 * (one.packed.targets_N % 17).float() - 0.2
            for number, mini_batch in enumerate(prepared.mini_batches)
            for place, one in enumerate(mini_batch)
        }

    def run(prepared: PreparedBatch, ranks: Any) -> PreparedBatch:
        return step_advantages(prepared, settings, ranks, references=references(prepared))

    alone = by_token(run(prepare_batch(parts, 3, settings), OtherRank()), parts)
    made = [prepare_batch(parts, 3, settings, rank=rank, num_ranks=2) for rank in range(2)]
    owns = []
    for prepared in made:
        run(prepared, rank := OtherRank())
        owns.append(rank.own)
    found: dict[Any, float] = {}
    for prepared, others in zip(made, reversed(owns), strict=True):
        found |= by_token(run(prepared, OtherRank(others)), parts)
    assert found == pytest.approx(alone)


def test_metrics_count_samples_turns_and_trajectories(make_samples: Any) -> None:
    samples = make_samples((2,), max_answer=12, seed=4)
    num = samples[0].trajectory.num_sampled
    assert num >= 3
    parts = [cut(samples[0], [1, 2, num]), samples[1]]
    metrics = prepare_batch(parts, 3, settings_of()).metrics
    assert metrics["trajectories_per_sample"] == 2.0
    assert (metrics["turns_mean"], metrics["turns_max"], metrics["sequences"]) == (2.0, 3.0, 4.0)
    assert metrics["response_len_max"] == max(num, samples[1].trajectory.num_sampled)
    assert metrics["tokens_sampled"] == num + samples[1].trajectory.num_sampled


def test_group_statistics_count_a_forked_sample_once() -> None:
    found = advantages(
        np.array([1.0, 0.0, 0.0]), np.zeros(3), [6, 2, 2], AdvantageSettings(kind="grpo_no_std"),
        trajectory_lengths_B=[(2, 2, 2), (2,), (2,)],
    )  # fmt: skip
    assert found == pytest.approx([2 / 3, -1 / 3, -1 / 3])
