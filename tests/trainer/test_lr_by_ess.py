"""The learning rate follows the effective sample size of the update's trajectories, however the update is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from areal_like.wire.messages import BatchSample
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import OptimizerSettings, TrainerSettings
from trainer.data.batch import prepare_batch
from trainer.lr_by_ess import LrByEss, effective_share, lr_factor
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.ranks import Ranks
from trainer.staleness_config import LrByEssSettings
from trainer.step import TrainStep, ready_model

SDPA = AttentionChoice("sdpa", "test")
GROUPS = (4, 2, 3, 4, 1)
LR = 1e-2


def oracle(log_weights: list[float]) -> float:
    """arXiv 2602.17616: ESS / M, ESS = (sum w)^2 / sum w^2, as it is written."""
    weights = [np.exp(np.float64(one)) for one in log_weights]
    return float(sum(weights) ** 2 / sum(one**2 for one in weights) / len(weights))


def trainer_of(model: PreTrainedModel, **changes: Any) -> TrainStep:
    keys: dict[str, Any] = {"micro_batch_tokens": 64, "optimizer": OptimizerSettings(lr=LR), **changes}
    config = TrainerSettings(**keys)
    setup = Setup(config, temperature=0.9, num_steps=10, attention=SDPA, ranks=Ranks.alone())
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)


def near_policy(model: PreTrainedModel, samples: list[BatchSample], scale: float) -> list[BatchSample]:
    """The same answers, sampled by a policy that differs from the model by a little at each token."""
    attach(model, SDPA)
    rng, found = np.random.default_rng(3), []
    for sample in samples:
        t = sample.trajectory
        packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
        with torch.no_grad():
            logprobs_N, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
        logprobs_T = np.zeros(len(t), np.float32)
        logprobs_T[t.loss_mask_T] = logprobs_N.numpy() + scale * rng.standard_normal(len(logprobs_N))
        found.append(msgspec.structs.replace(sample, trajectory=msgspec.structs.replace(t, logprobs_T=logprobs_T)))
    return found


def own_log_weights(model: PreTrainedModel, samples: list[BatchSample]) -> list[float]:
    """One sequence at a time."""
    found = []
    for sample in samples:
        t = sample.trajectory
        packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
        with torch.no_grad():
            logprobs_N, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
        found.append(float((logprobs_N.double().numpy() - t.logprobs_T[t.loss_mask_T].astype(np.float64)).sum()))
    return found


@settings(max_examples=num_examples(100), deadline=None)
@given(log_weights=st.lists(st.floats(-30, 30), min_size=1, max_size=20), shift=st.floats(-1e3, 1e3))
def test_share_equals_its_definition_and_ignores_a_common_factor(log_weights: list[float], shift: float) -> None:
    weights_M = np.asarray(log_weights)
    share = effective_share(weights_M)
    assert share == pytest.approx(oracle(log_weights), rel=1e-9)
    assert 1 / len(log_weights) - 1e-12 <= share <= 1 + 1e-12
    assert effective_share(weights_M + shift) == pytest.approx(share, rel=1e-6)


def test_share_of_equal_of_one_and_of_no_weights() -> None:
    assert effective_share(np.full(7, 3.0)) == 1.0
    assert effective_share(np.array([0.0, -np.inf, -np.inf, -np.inf])) == 0.25
    assert effective_share(np.array([5000.0, 0.0])) == 0.5
    assert effective_share(np.full(3, -np.inf)) == 0.0
    assert effective_share(np.array([0.0, np.nan])) == 0.0


@pytest.mark.parametrize(
    ("power", "reference", "share", "factor"),
    [(0.5, 1.0, 0.25, 0.5), (1.0, 1.0, 0.25, 0.25), (0.5, 0.5, 0.125, 0.5), (0.5, 0.5, 0.8, 1.0), (0.5, 1.0, 0.0, 0.0)],
)
def test_factor_is_the_power_of_the_share_and_never_above_one(
    power: float, reference: float, share: float, factor: float
) -> None:
    assert lr_factor(share, LrByEssSettings(power=power, reference=reference)) == pytest.approx(factor)


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_rate_of_a_step_is_scaled_by_the_weights_of_its_updates(
    tiny_model: Callable[..., Any], make_samples: Any, mini_batches: int
) -> None:
    model = tiny_model()
    samples = near_policy(model, make_samples(GROUPS), 0.3)
    trainer = trainer_of(model, lr_by_ess={}, mini_batches=mini_batches)
    prepared = trainer.prepare(samples, version=3)
    before = own_log_weights(model, samples)
    metrics = trainer.run(prepared)
    places = [[place for one in cut for place in one.places_S] for cut in prepared.mini_batches]
    first = np.sqrt(oracle([before[place] for place in places[0]]))
    assert 0 < first < 1
    if mini_batches == 1:
        assert metrics["lr"] == pytest.approx(LR * first, rel=1e-4)
        assert metrics["ess_sequences"] == pytest.approx(first**2, rel=1e-4)
    assert 0 < metrics["lr_factor"] < 1
    plain = trainer_of(tiny_model(), mini_batches=mini_batches)
    without = plain.run(plain.prepare(samples, version=3))
    assert without["lr"] == LR
    assert not {"lr_factor", "ess_sequences"} & set(without)


def test_weights_of_a_later_update_are_those_of_the_policy_it_begins_with(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    model = tiny_model()
    samples = near_policy(model, make_samples((3, 3)), 0.3)
    trainer = trainer_of(model, lr_by_ess={}, mini_batches=2)
    prepared = trainer.prepare(samples, version=3)
    places = [[place for one in cut for place in one.places_S] for cut in prepared.mini_batches]
    expected: list[float] = []
    update = trainer.policy.update

    def noting(step: int, *, lr_factor: float = 1.0) -> Any:
        weights = own_log_weights(model, samples)
        expected.append(oracle([weights[place] for place in places[len(expected)]]))
        assert lr_factor == pytest.approx(np.sqrt(expected[-1]), rel=1e-4)
        return update(step, lr_factor=lr_factor)

    trainer.policy.update = noting  # type: ignore[method-assign]
    metrics = trainer.run(prepared)
    assert metrics["ess_sequences"] == pytest.approx(np.mean(expected), rel=1e-4)


def test_micro_batches_do_not_change_the_factor(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    samples, found = near_policy(tiny_model(), make_samples(GROUPS), 0.3), []
    for tokens in (10_000, 64, 20):
        trainer = trainer_of(tiny_model(), lr_by_ess={}, micro_batch_tokens=tokens)
        found.append(trainer.run(trainer.prepare(samples, version=3))["lr_factor"])
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)


def test_ranks_do_not_change_the_factor(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    """Two ranks that each hold a part, played one after the other: what the second adds up is what both have."""
    model = tiny_model()
    samples = near_policy(model, make_samples(GROUPS), 0.3)
    config = TrainerSettings(micro_batch_tokens=64)
    whole = effective_share(np.asarray(own_log_weights(model, samples)))
    seen: list[torch.Tensor] = []

    def summed(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.clone())
        return torch.stack(seen).sum(0)

    shares = []
    for rank in range(2):
        ranks = Ranks.alone()
        ranks.sum = summed  # type: ignore[method-assign]
        meter = LrByEss(LrByEssSettings(power=1.0), ranks)
        meter.begin(len(samples))
        prepared = prepare_batch(samples, 3, config, rank=rank, num_ranks=2)
        for micro_batch in prepared.mini_batches[0]:
            with torch.no_grad():
                logprobs_N, _ = token_logprobs(
                    model, micro_batch.packed, temperature=0.9, chunk_tokens=512, with_entropy=False
                )
            meter.add(micro_batch, logprobs_N)
            meter.add(replace(micro_batch, is_dummy=True), torch.zeros_like(logprobs_N))
        shares.append(meter.factor())
    assert shares[1] == pytest.approx(whole, rel=1e-5)
    assert shares[0] != pytest.approx(whole, rel=1e-3)
