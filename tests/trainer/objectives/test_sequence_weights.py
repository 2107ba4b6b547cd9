"""A sequence weighs the same in a step whatever its length, and however the step is cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from areal_like.trajectory import Segment, Trajectory
from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import LossSettings, OptimizerSettings, TrainerSettings
from trainer.data.batch import prepare_batch
from trainer.model.attention import AttentionChoice
from trainer.objectives.aggregation import token_coefficients
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

AGGREGATIONS = ("token_mean", "sequence_mean", "group_mean", "constant")
GROUP_SIZES = (4, 2, 3, 4, 1, 4, 4, 3, 2)
DIVISOR = 30.0


def long_tailed(group_sizes: Sequence[int], seed: int = 0) -> list[BatchSample]:
    """Answers whose lengths differ by two orders of magnitude; lengths within a group are alike."""
    rng = np.random.default_rng(seed)
    samples = []
    for group_id, size in enumerate(group_sizes):
        centre = rng.normal(2.5, 0.9)
        for index in range(size):
            length = int(np.clip(np.exp(rng.normal(centre, 0.6)), 1, 200))
            answer = Segment(
                rng.integers(3, 61, length).astype(np.int32),
                (-rng.exponential(3.0, length)).astype(np.float32),
                np.full(length, 3, np.int32),
            )
            prompt_P = np.array([3 + group_id, 3 + index], np.int32)  # tells the sequences apart
            trajectory = Trajectory.from_prompt(prompt_P, answer, "stop")
            reward = float(rng.integers(0, 2))
            samples.append(BatchSample(group_id=group_id, sample_index=index, trajectory=trajectory, reward=reward))
    return samples


def oracle(lengths: Sequence[int], groups: Sequence[int], aggregation: str) -> list[float]:
    """Weight of a whole sequence in a step's mean loss, from the definition, by hand."""
    tokens_of = {g: sum(n for n, h in zip(lengths, groups, strict=True) if h == g) for g in groups}
    num = len(lengths)
    return {
        "token_mean": [n / sum(lengths) for n in lengths],
        "sequence_mean": [1 / num for _ in lengths],
        "group_mean": [n / (len(tokens_of) * tokens_of[g]) for n, g in zip(lengths, groups, strict=True)],
        "constant": [n / (num * DIVISOR) for n in lengths],
    }[aggregation]


def weights_in_step(samples: Sequence[BatchSample], settings: TrainerSettings, num_ranks: int) -> list[float]:
    """Sum of each sequence's token weights over all updates, micro-batches and ranks, over the number of updates."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for rank in range(num_ranks):
        prepared = prepare_batch(samples, 3, settings, rank=rank, num_ranks=num_ranks)
        for mini_batch in prepared.mini_batches:
            for one in mini_batch:
                if one.is_dummy:
                    assert not one.inputs.coefficient_N.any()
                    continue
                sequences = one.packed.tokens_T.split(list(one.packed.lengths))
                for number, tokens_T in enumerate(sequences):
                    weight = float(one.inputs.coefficient_N[one.packed.sequence_N == number].double().sum())
                    found[tuple(tokens_T.tolist())] += weight / len(prepared.mini_batches)
    assert len(found) == len(samples)
    return [found[tuple(sample.trajectory.tokens_T.tolist())] for sample in samples]


@pytest.mark.parametrize("num_updates", [1, 4])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_coefficients_equal_the_definition(aggregation: Any, num_updates: int) -> None:
    lengths, groups = [3, 70, 1, 5, 400], [0, 0, 1, 1, 2]
    settings = LossSettings(aggregation=aggregation, constant_divisor=DIVISOR)
    weights = token_coefficients(lengths, groups, settings, num_updates=num_updates) * lengths
    np.testing.assert_allclose(weights, num_updates * np.array(oracle(lengths, groups, aggregation)), rtol=1e-12)


@pytest.mark.parametrize("mini_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weight_of_a_sequence_in_a_step_is_the_same_however_the_step_is_cut(
    aggregation: Any, mini_batches: int
) -> None:
    samples = long_tailed(GROUP_SIZES)
    lengths = [sample.trajectory.num_sampled for sample in samples]
    assert max(lengths) > 30 * min(lengths)
    expected = oracle(lengths, [sample.group_id for sample in samples], aggregation)
    for micro_batch_tokens in (40, 300, 10_000):
        settings = TrainerSettings(
            mini_batches=mini_batches,
            micro_batch_tokens=micro_batch_tokens,
            loss=LossSettings(aggregation=aggregation, constant_divisor=DIVISOR),
        )
        for num_ranks in (1, 2, 3):
            found = weights_in_step(samples, settings, num_ranks)
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "group_mean"])
def test_a_group_cut_over_several_mini_batches_still_counts_as_one(aggregation: Any) -> None:
    samples = long_tailed((5, 3))  # fewer groups than mini-batches: sequences are dealt one by one
    settings = TrainerSettings(mini_batches=4, loss=LossSettings(aggregation=aggregation))
    lengths = [sample.trajectory.num_sampled for sample in samples]
    expected = oracle(lengths, [sample.group_id for sample in samples], aggregation)
    np.testing.assert_allclose(weights_in_step(samples, settings, 1), expected, rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mean_loss_of_several_updates_is_the_loss_of_one(aggregation: Any, tiny_model: Callable[..., Any]) -> None:
    samples, losses = long_tailed(GROUP_SIZES), []
    for mini_batches in (1, 4, 8):
        model = tiny_model()
        settings = TrainerSettings(
            mini_batches=mini_batches,
            loss=LossSettings(aggregation=aggregation, constant_divisor=DIVISOR),
            optimizer=OptimizerSettings(lr=0.0),
        )
        attention = AttentionChoice("sdpa", "test")
        setup = Setup(settings, temperature=0.9, num_steps=10, attention=attention, ranks=Ranks.alone())
        ready_model(model, setup)
        step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=len(GROUP_SIZES))
        losses.append(step.run(step.prepare(samples, version=3))["loss"])
    assert abs(losses[0]) > 1e-3
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
