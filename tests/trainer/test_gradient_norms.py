"""Gradients of single samples: their norms, and the step that takes its advantages from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import AdvantageSettings, OptimizerSettings, TrainerSettings
from trainer.gradient_norms import square_norms
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

SDPA = AttentionChoice("sdpa", "test")
GROUPS = (4, 2, 3, 4, 1)


def trainer_of(model: PreTrainedModel, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {
        "micro_batch_tokens": 64, "optimizer": OptimizerSettings(lr=1e-2),
        "advantage": AdvantageSettings(kind="opob"), **changes,
    }  # fmt: skip
    setup = Setup(
        TrainerSettings(**keys), temperature=0.9, num_steps=10, attention=SDPA,
        ranks=Ranks.alone(),
    )  # fmt: skip
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)


def alone(model: PreTrainedModel, sample: BatchSample) -> tuple[float, float]:
    """Square norm of the gradient, and log-weight, of one sample."""
    attach(model, SDPA)
    t = sample.trajectory
    packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
    logprobs_N, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
    gradients = torch.autograd.grad(logprobs_N.sum(), list(model.parameters()), allow_unused=True)
    square = sum(float(one.double().square().sum()) for one in gradients if one is not None)
    return square, float((logprobs_N.detach().double().numpy() - t.logprobs_T[t.loss_mask_T]).sum())


@pytest.mark.parametrize("tokens", [10_000, 20])
def test_norms_are_those_of_each_sample_alone(tiny_model: Callable[..., Any], make_samples: Any, tokens: int) -> None:
    trainer = trainer_of(tiny_model(), micro_batch_tokens=tokens)
    samples = make_samples(GROUPS)
    prepared = trainer.prepare(samples, 3)
    found_B = square_norms(prepared, trainer.policy, Ranks.alone())
    rewards = prepared.rewards
    num_passed = 0
    for place, sample in enumerate(samples):
        is_equal = np.ptp(rewards.rewards_B[rewards.group_ids_B == rewards.group_ids_B[place]]) == 0
        expected = 1.0 if is_equal else alone(tiny_model(), sample)[0]
        assert found_B[place] == pytest.approx(expected, rel=1e-4)
        num_passed += not is_equal
    assert num_passed > 3
    assert trainer.policy.own_gradients() == {}


@pytest.mark.parametrize("tokens", [10_000, 20])
@pytest.mark.parametrize("gradient_norm", ["exact", "length"])
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_a_step_gets_the_advantages_of_the_formula(
    tiny_model: Callable[..., Any], make_samples: Any, tokens: int, gradient_norm: str, mini_batches: int
) -> None:
    advantage = AdvantageSettings(kind="opob", options={"gradient_norm": gradient_norm})
    trainer = trainer_of(tiny_model(), advantage=advantage, micro_batch_tokens=tokens, mini_batches=mini_batches)
    samples = make_samples(GROUPS)
    prepared = trainer.prepare(samples, 3)
    assert prepared.metrics["advantage_abs_mean"] == 0.0
    assert prepared.metrics["forward_only_share"] == 0.0
    whole = trainer._with_step_advantages(prepared, trainer._proximal(prepared))
    found = {
        place: float(one.inputs.advantage_N.numpy()[one.packed.sequence_N.numpy() == number][0])
        for mini_batch in whole.mini_batches
        for one in mini_batch
        for number, place in enumerate(one.places_S)
    }
    facts = [alone(tiny_model(), sample) for sample in samples]
    rewards_B = np.array([sample.reward for sample in samples])
    lengths_B = prepared.rewards.lengths_B
    for group in range(len(GROUPS)):
        members = [place for place, sample in enumerate(samples) if sample.group_id == group]
        squares = [facts[place][0] if gradient_norm == "exact" else lengths_B[place] for place in members]
        shares = [np.exp(2 * facts[place][1]) * square for place, square in zip(members, squares, strict=True)]
        baseline = np.dot(shares, rewards_B[members]) / np.sum(shares)
        for place in members:
            assert found[place] == pytest.approx(rewards_B[place] - baseline, rel=1e-3, abs=1e-4)


def test_it_learns_and_leaves_no_gradient_behind(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    trainer = trainer_of(tiny_model(), gradient_cosine={"every_steps": 1})
    rows = [trainer.run(trainer.prepare(make_samples(GROUPS, seed=step), 3 + step)) for step in range(2)]
    assert "gradient_cosine" not in rows[0]
    assert -1.0 <= rows[1]["gradient_cosine"] <= 1.0
    assert rows[1]["advantage_abs_mean"] > 0
    assert rows[1]["grad_norm"] > 0
