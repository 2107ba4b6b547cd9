"""One step: the same gradient however it is cut, the same bits every time, and it learns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
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

from areal_like.errors import UserError
from areal_like.wire.messages import BatchSample
from trainer import step as step_module
from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import (
    AdapterSettings,
    AdvantageSettings,
    CriticSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    TrainerSettings,
    WeightClip,
)
from trainer.critic import update_metrics
from trainer.data.batch import PreparedBatch, _filler, prepare_batch, split
from trainer.data.dealing import micro_batches
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import token_logprobs
from trainer.model.lora import add_adapter
from trainer.model.packed import PackedSequences
from trainer.optimizer import UpdateResult
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_critic, ready_model

SDPA = AttentionChoice("sdpa", "test")
UNEQUAL = (4, 2, 3, 4, 1)


def _settings(**changes: Any) -> TrainerSettings:
    return TrainerSettings(**{"micro_batch_tokens": 64, "optimizer": OptimizerSettings(lr=1e-2), **changes})


def _trainer(model: PreTrainedModel, config: TrainerSettings, **changes: Any) -> TrainStep:
    setup = Setup(config, temperature=0.9, num_steps=10, attention=SDPA, ranks=Ranks.alone())
    ready_model(model, setup)
    keys: dict[str, Any] = {"groups_per_step": 8, **changes}
    return TrainStep(TorchBackend(model, setup), setup, **keys)


def _weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _gradient(trainer: TrainStep, prepared: PreparedBatch) -> list[torch.Tensor]:
    """Of the first mini-batch, without an update."""
    trainer.policy.zero_grad()
    for micro_batch in prepared.mini_batches[0]:
        trainer._backward(micro_batch, None, is_last=False)
    return [p.grad.clone() for p in trainer.policy.model.parameters() if p.grad is not None]


def _relative_error(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (ours, theirs))
    return float((a - b).norm() / b.norm())


def _on_policy(model: PreTrainedModel, samples: Sequence[BatchSample], version: int) -> list[BatchSample]:
    """The same answers with the log-probs this model gives them."""
    attach(model, SDPA)
    result = []
    for sample in samples:
        t = sample.trajectory
        packed = PackedSequences.build([t.tokens_T], [t.loss_mask_T])
        with torch.no_grad():
            logprobs_N, _ = token_logprobs(model, packed, temperature=0.9, chunk_tokens=512, with_entropy=False)
        logprobs_T = np.zeros(len(t), np.float32)
        logprobs_T[t.loss_mask_T] = logprobs_N.numpy()
        versions_T = np.where(t.loss_mask_T, version, -1).astype(np.int32)
        changed = msgspec.structs.replace(t, logprobs_T=logprobs_T, versions_T=versions_T)
        result.append(msgspec.structs.replace(sample, trajectory=changed))
    return result


# ---------------------------------------------------------------- cutting


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_mean", "constant"])
def test_micro_batches_do_not_change_the_gradient(
    aggregation: Any, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, gradients = make_samples(UNEQUAL), []
    for tokens in (10_000, 64, 20):
        config = _settings(loss=LossSettings(aggregation=aggregation), micro_batch_tokens=tokens)
        trainer = _trainer(tiny_model(), config)
        prepared = trainer.prepare(samples, version=3)
        gradients.append(_gradient(trainer, prepared))
    assert prepared.metrics["micro_batches"] > 4
    assert _relative_error(gradients[1], gradients[0]) < 1e-5
    assert _relative_error(gradients[2], gradients[0]) < 1e-5


def test_a_mean_per_micro_batch_would_change_the_gradient(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    config = _settings(micro_batch_tokens=20)
    trainer = _trainer(tiny_model(), config)
    prepared = trainer.prepare(make_samples(UNEQUAL), version=3)
    right = _gradient(trainer, prepared)
    (mini_batch,) = prepared.mini_batches
    naive = tuple(
        replace(
            micro_batch,
            inputs=replace(
                micro_batch.inputs,
                coefficient_N=torch.full_like(
                    micro_batch.inputs.coefficient_N, 1 / (len(mini_batch) * micro_batch.packed.num_predictions)
                ),
            ),
        )
        for micro_batch in mini_batch
    )
    wrong = _gradient(trainer, replace(prepared, mini_batches=(naive,)))
    assert _relative_error(wrong, right) > 0.01


@settings(max_examples=num_examples(80), deadline=None)
@given(group_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), num=st.integers(1, 8), seed=st.integers(0, 99))
def test_mini_batches_keep_groups_whole_while_there_are_enough_of_them(
    group_sizes: list[int], num: int, seed: int
) -> None:
    group_ids = np.repeat(np.arange(len(group_sizes)), group_sizes)
    lengths = np.random.default_rng(seed).integers(1, 50, len(group_ids)).tolist()
    shares = split(lengths, group_ids.tolist(), num)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert len(shares) == min(num, len(lengths))
    assert all(shares)
    if len(group_sizes) >= num:
        homes = [{int(group_ids[i]) for i in share} for share in shares]
        assert sum(len(home) for home in homes) == len(group_sizes)


def test_a_sequence_longer_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert micro_batches([5, 90, 7], 20) == [[1], [0, 2]]
    assert micro_batches([90], 20) == [[0]]


def test_metrics_of_the_batch_are_about_sampled_tokens_and_raw_rewards(make_samples: Any) -> None:
    samples = make_samples(UNEQUAL)
    metrics = prepare_batch(samples, 5, _settings()).metrics
    lengths = [sample.trajectory.num_sampled for sample in samples]
    ages = np.concatenate([5 - s.trajectory.versions_T[s.trajectory.loss_mask_T] for s in samples])
    assert metrics["sequences"] == sum(UNEQUAL)
    assert metrics["groups"] == len(UNEQUAL)
    assert metrics["tokens"] == sum(len(sample.trajectory) for sample in samples)
    assert metrics["response_len_mean"] == pytest.approx(np.mean(lengths))
    assert metrics["response_len_max"] == max(lengths)
    assert metrics["reward_mean"] == pytest.approx(np.mean([sample.reward for sample in samples]))
    assert metrics["staleness_mean"] == pytest.approx(ages.mean())
    assert metrics["staleness_max"] == ages.max() == 4
    assert 0 < metrics["packing_efficiency"] <= 1


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        prepare_batch([], 0, _settings())


# ---------------------------------------------------------------- passes


def test_leaving_the_proximal_pass_out_of_a_single_update_changes_no_bit(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    results = []
    for always in (False, True):
        model = tiny_model()
        trainer = _trainer(model, _settings(loss=LossSettings(weight=WeightClip(mode="exact"))))
        trainer._always_recompute = always
        passes: list[bool] = []
        inner = trainer._logprobs
        trainer._logprobs = lambda *a, _inner=inner, _passes=passes, **k: _passes.append(True) or _inner(*a, **k)  # type: ignore[method-assign]
        metrics = trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
        results.append((metrics, _weights(model), len(passes)))
    (metrics, weights, num), (recomputed_metrics, recomputed_weights, recomputed_num) = results
    assert recomputed_num == 2 * num
    assert metrics == recomputed_metrics
    assert all(torch.equal(a, b) for a, b in zip(weights, recomputed_weights, strict=True))


def test_with_one_update_the_ratio_is_one_everywhere(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    trainer = _trainer(tiny_model(), _settings())
    metrics = trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["updates"] == 1


def test_with_several_updates_the_proximal_policy_is_the_one_the_step_started_from(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples = make_samples((3, 3, 3, 3))
    config = _settings(mini_batches=4)
    trainer = _trainer(tiny_model(), config)
    prepared = trainer.prepare(samples, version=3)
    proximal = trainer._proximal(prepared)
    assert len(prepared.mini_batches) == 4
    metrics = trainer.run(prepared)
    assert 0 < metrics["grad_norm"] < metrics["grad_norm_max"], "the mean and the largest of four"
    assert metrics["ratio_min"] < 1 < metrics["ratio_max"]
    assert metrics["updates"] == 4
    fresh = _trainer(tiny_model(), config)
    again = fresh._proximal(prepared)
    assert all(torch.equal(proximal[key], again[key]) for key in again)
    frozen = _trainer(tiny_model(), _settings(mini_batches=4, optimizer=OptimizerSettings(lr=0.0)))
    unmoved = frozen.run(frozen.prepare(samples, version=3))
    assert unmoved["ratio_min"] == unmoved["ratio_max"] == 1.0


@pytest.mark.parametrize(("mini_batches", "passes"), [(1, 3), (2, 2)])
def test_further_passes_repeat_the_mini_batches_from_the_same_starting_point(
    tiny_model: Callable[..., Any], make_samples: Any, mini_batches: int, passes: int
) -> None:
    """Against a loop that is written out; every pass keeps the proximal policy the step began with."""
    samples, config = make_samples((3, 3, 3, 3)), _settings(mini_batches=mini_batches, passes_per_batch=passes)
    model = tiny_model()
    trainer = _trainer(model, config)
    metrics = trainer.run(trainer.prepare(samples, version=3))
    other = tiny_model()
    plain = _trainer(other, _settings(mini_batches=mini_batches))
    plain._always_recompute = True
    prepared = plain.prepare(samples, version=3)
    proximal = plain._proximal(prepared)
    for _ in range(passes):
        for number, mini_batch in enumerate(prepared.mini_batches):
            plain.policy.zero_grad()
            for place, micro_batch in enumerate(mini_batch):
                plain._backward(micro_batch, proximal[number, place], is_last=place == len(mini_batch) - 1)
            plain.policy.update(prepared.step)
    assert all(torch.equal(a, b) for a, b in zip(_weights(model), _weights(other), strict=True))
    assert metrics["updates"] == passes * mini_batches
    assert metrics["ratio_min"] < 1 < metrics["ratio_max"]


def test_passes_that_move_nothing_report_what_one_pass_reports(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    found = []
    for passes in (1, 4):
        config = _settings(mini_batches=2, passes_per_batch=passes, optimizer=OptimizerSettings(lr=0.0))
        trainer = _trainer(tiny_model(), config)
        found.append(trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3)))
    assert found[1].pop("updates") == 4 * found[0].pop("updates")
    assert found[1] == pytest.approx(found[0])


@pytest.mark.parametrize("proximal", ["interpolate", "behaviour"])
def test_modes_that_need_no_proximal_pass_make_none(
    proximal: Any, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    trainer = _trainer(tiny_model(), _settings(mini_batches=3, loss=LossSettings(proximal=proximal)))
    prepared = trainer.prepare(make_samples(UNEQUAL), version=3)
    assert trainer._proximal(prepared) == {}
    assert np.isfinite(trainer.run(prepared)["loss"])


def test_on_policy_samples_have_weight_one_and_no_divergence(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    model = tiny_model()
    samples = _on_policy(model, make_samples(UNEQUAL), version=7)
    trainer = _trainer(model, _settings())
    metrics = trainer.run(trainer.prepare(samples, version=7))
    assert metrics["weight_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert abs(metrics["kl_behaviour_proximal"]) < 1e-6
    assert metrics["staleness_max"] == 0


def test_same_inputs_give_the_same_bits_also_when_prepared_in_another_thread(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, results = make_samples(UNEQUAL), []
    for in_thread in (False, True):
        model = tiny_model()
        trainer = _trainer(model, _settings(mini_batches=2))
        prepared: list[PreparedBatch] = []

        def prepare(trainer: TrainStep = trainer, out: list[PreparedBatch] = prepared) -> None:
            out.append(trainer.prepare(samples, 3))

        if in_thread:
            thread = threading.Thread(target=prepare)
            thread.start()
            thread.join(timeout=300.0)
        else:
            prepare()
        metrics = trainer.run(prepared[0])
        results.append((metrics, _weights(model)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_gradient_checkpointing_gives_the_same_bits(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    results = []
    for is_on in (False, True):
        model = tiny_model()
        trainer = _trainer(model, _settings(gradient_checkpointing=is_on))
        trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
        results.append(_weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("is_on", "passes"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("is_critic", [False, True])
def test_gradient_checkpointing_computes_layers_twice_and_an_adapter_learns_under_it(
    tiny_model: Callable[..., Any], make_samples: Any, is_on: bool, passes: int, is_critic: bool
) -> None:
    """Its base has no gradient, so that torch's older way of recomputing would leave the adapter without one."""
    model = tiny_model()
    add_adapter(model, AdapterSettings(rank=2, alpha=4.0), seed=1)
    config = _settings(gradient_checkpointing=is_on, lora=LoraSettings(rank=2, alpha=4.0))
    setup = Setup(config, temperature=0.9, num_steps=10, attention=SDPA, ranks=Ranks.alone())
    if is_critic:
        ready_critic(model, setup)
    else:
        assert ready_model(model, setup) < 1e-3
    calls: list[int] = []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer = TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)
    gradients = _gradient(trainer, trainer.prepare(make_samples([4]), version=3))
    assert len(calls) == passes
    assert len(gradients) == 2 * 2 * 7
    assert max(float(gradient.abs().max()) for gradient in gradients) > 0


def test_kl_to_a_reference_is_measured_and_the_reference_stays(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    model, reference = tiny_model(), tiny_model(seed=1)
    before = _weights(reference)
    trainer = _trainer(model, _settings(loss=LossSettings(kl_coef=0.1)), reference=reference)
    metrics = trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
    assert metrics["kl_reference"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(reference), strict=True))
    same = _trainer(tiny_model(), _settings(loss=LossSettings(kl_coef=0.1)), reference=tiny_model())
    assert same.run(same.prepare(make_samples(UNEQUAL), version=3))["kl_reference"] == 0.0


def test_entropy_bonus_changes_the_update(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    results = []
    for coefficient in (0.0, 0.5):
        model = tiny_model()
        trainer = _trainer(model, _settings(loss=LossSettings(entropy_coef=coefficient)))
        metrics = trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
        results.append((metrics["entropy"], _weights(model)))
    assert results[0][0] == results[1][0] > 0
    assert not all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_bfloat16_keeps_float32_parameters_and_stays_close(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    gradients = []
    for precision in ("float32", "bfloat16"):
        trainer = _trainer(tiny_model(initializer_range=0.05), _settings(precision=precision))
        gradients.append(_gradient(trainer, trainer.prepare(make_samples(UNEQUAL), version=3)))
        assert all(parameter.dtype == torch.float32 for parameter in trainer.policy.model.parameters())
    assert 0 < _relative_error(gradients[1], gradients[0]) < 0.1


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    model = tiny_model()
    trainer = _trainer(model, _settings())
    prepared = trainer.prepare(make_samples(UNEQUAL), version=3)
    before = _weights(model)
    prepared.mini_batches[0][0].inputs.advantage_N[0] = float("nan")
    metrics = trainer.run(prepared)
    assert metrics["skipped_updates"] == 1
    assert metrics["updates"] == 0
    assert metrics["grad_norm"] == metrics["grad_norm_max"] == 0.0, "no update has one"
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(model), strict=True))


def test_more_groups_than_a_step_has_is_our_mistake(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    trainer = _trainer(tiny_model(), _settings(), groups_per_step=2)
    with pytest.raises(AssertionError, match="more groups"):
        trainer.prepare(make_samples(UNEQUAL), version=3)


def test_norms_are_of_the_updates_that_were_applied_and_the_rate_is_the_last_ones() -> None:
    updates = [UpdateResult(3.0, 0.5, True), UpdateResult(float("nan"), 0.25, False), UpdateResult(1.0, 0.125, True)]
    assert update_metrics(updates) == {
        "grad_norm": 2.0, "grad_norm_max": 3.0, "lr": 0.125, "updates": 2.0, "skipped_updates": 1.0
    }  # fmt: skip


def test_reference_is_switched_off_and_must_be_there_where_the_loss_needs_it(tiny_model: Callable[..., Any]) -> None:
    reference = tiny_model(seed=1).train()
    trainer = _trainer(tiny_model(), _settings(loss=LossSettings(kl_coef=0.1)), reference=reference)
    assert trainer.reference is reference
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert _trainer(tiny_model(), _settings(), reference=reference).reference is None
    with pytest.raises(UserError, match="the loss or the advantage requires a reference model"):
        _trainer(tiny_model(), _settings(loss=LossSettings(kl_coef=0.1)))


def test_each_update_is_announced_before_the_weights_change(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    seen: list[list[torch.Tensor]] = []
    model = tiny_model()
    trainer = _trainer(model, _settings(mini_batches=2), before_update=lambda: seen.append(_weights(model)))
    first = _weights(model)
    trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
    assert len(seen) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, seen[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))


def test_span_tells_which_mini_batch_and_how_many_tokens(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    spans: list[tuple[str, str, dict[str, Any]]] = []

    class Spans:
        def span(self, name: str, lane: str = "main", **args: Any) -> contextlib.AbstractContextManager[None]:
            spans.append((name, lane, args))
            return contextlib.nullcontext()

    config = _settings(mini_batches=2, micro_batch_tokens=10_000)
    trainer = _trainer(tiny_model(), config, tracer=Spans())
    prepared = trainer.prepare(make_samples(UNEQUAL), version=3)
    trainer.run(prepared)
    tokens = [one.packed.num_tokens for mini_batch in prepared.mini_batches for one in mini_batch]
    assert spans == [
        ("pack", "prepare", {}), ("proximal", "main", {}),
        ("micro_batch", "main", {"mini_batch": 0, "tokens": tokens[0]}), ("update", "main", {"mini_batch": 0}),
        ("micro_batch", "main", {"mini_batch": 1, "tokens": tokens[1]}), ("update", "main", {"mini_batch": 1}),
    ]  # fmt: skip


def test_a_critic_gives_values_begins_and_takes_its_passes_and_updates_in_turns(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    log: list[Any] = []

    class Played:
        def values(self, micro_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            log.append("values")
            return torch.zeros(len(micro_batch.packed.targets_N)), torch.zeros(len(micro_batch.packed.lengths))

        def is_alone(self, step: int) -> bool:
            return False

        def begin(self, prepared: PreparedBatch) -> None:
            log.append(f"begin {prepared.step}")

        def zero_grad(self) -> None:
            log.append("zero_grad")

        def backward(self, micro_batch: Any, *, is_last: bool) -> None:
            log.append(f"backward {is_last}")

        def update(self, step: int) -> None:
            log.append(f"update {step}")

        def metrics(self) -> dict[str, float]:
            return {"value_loss": 7.0}

    advantage = AdvantageSettings(kind="gae")
    config = _settings(critic=CriticSettings(), advantage=advantage, mini_batches=2, micro_batch_tokens=10_000)
    trainer = _trainer(tiny_model(), config, critic=Played())
    assert trainer.run(trainer.prepare(make_samples((2, 2)), version=3))["value_loss"] == 7.0
    assert log == ["values"] * 2 + ["begin 4"] + ["zero_grad", "backward True", "update 4"] * 2


@pytest.mark.parametrize("has_adapter", [False, True])
def test_entropies_are_computed_for_the_loss_alone(
    tiny_model: Callable[..., Any], make_samples: Any, monkeypatch: pytest.MonkeyPatch, has_adapter: bool
) -> None:
    """They cost a pass over the vocabulary, which neither proximal nor reference log-probs need."""
    asked: list[tuple[str, bool]] = []
    model, lora = tiny_model(), LoraSettings(rank=2, alpha=4.0) if has_adapter else None
    if lora is not None:
        add_adapter(model, lora, seed=1)
    config = _settings(loss=LossSettings(kl_coef=0.1), mini_batches=2, micro_batch_tokens=10_000, lora=lora)
    trainer = _trainer(model, config, reference=None if has_adapter else tiny_model(seed=1))
    right, reference = trainer.policy.logprobs, step_module.policy_logprobs

    def watched(packed: Any, *, with_entropy: bool) -> Any:
        asked.append(("policy", with_entropy))
        return right(packed, with_entropy=with_entropy)

    def of_reference(model: Any, packed: Any, setup: Any, *, with_entropy: bool) -> Any:
        if model is trainer.reference:
            asked.append(("reference", with_entropy))
        return reference(model, packed, setup, with_entropy=with_entropy)

    monkeypatch.setattr(trainer.policy, "logprobs", watched)
    monkeypatch.setattr(step_module, "policy_logprobs", of_reference)
    trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
    other = ("policy" if has_adapter else "reference", False)
    assert asked == [("policy", False)] * 2 + [other, ("policy", True)] * 2


@pytest.mark.parametrize("loss", [{}, {"kind": "bapo", "proximal": "behaviour", "weight": WeightClip(mode="off")}])
def test_a_filler_changes_neither_metrics_nor_weights(
    tiny_model: Callable[..., Any], make_samples: Any, loss: dict[str, Any]
) -> None:
    """It keeps other ranks company; also where statistics of the whole step are asked for."""
    found = []
    samples = make_samples(UNEQUAL)
    for is_filled in (False, True):
        model = tiny_model()
        trainer = _trainer(model, _settings(loss=LossSettings(**loss), mini_batches=2))
        prepared = trainer.prepare(samples, version=3)
        if is_filled:
            filler = _filler(samples[0].trajectory, 3)
            parts = tuple((filler, *mini_batch, filler) for mini_batch in prepared.mini_batches)
            prepared = replace(prepared, mini_batches=parts)
        found.append((trainer.run(prepared), _weights(model)))
    (metrics, plain), (others, filled) = found
    assert others == metrics
    assert all(torch.equal(a, b) for a, b in zip(plain, filled, strict=True))


@pytest.mark.parametrize(("device", "choice"), [("cpu", "varlen"), ("cuda", "sdpa")])
def test_a_model_on_the_host_is_proved_with_a_kernel_of_the_host_and_then_gets_its_own(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, device: str, choice: str
) -> None:
    seen: list[Any] = []
    own = AttentionChoice("varlen", "test")
    setup = Setup(
        _settings(precision="bfloat16"), 0.9, num_steps=10, attention=own, ranks=Ranks.alone(device), max_context=77
    )
    monkeypatch.setattr(
        "trainer.step.agreement.check", lambda model, *rest: seen.append((model.training, *rest)) or 0.5
    )
    monkeypatch.setattr("trainer.step.attach", lambda model, choice: seen.append(choice))
    assert ready_model(tiny_model().train(), setup) == 0.5
    (training, checked, dtype, temperature, max_context), attached = seen
    assert (training, checked.name, dtype, temperature, max_context) == (False, choice, torch.bfloat16, 0.9, 77)
    assert attached is own


def no_gradient(current_N: torch.Tensor, tokens: Any) -> torch.Tensor:
    return current_N.detach()


def no_shape(tokens: Any) -> torch.Tensor:
    return torch.ones(1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"kind": f"{__name__}:no_gradient"}, "has no gradient"),
        ({"corrections": [{"kind": f"{__name__}:no_shape"}]}, "no_shape returned"),
    ],
)
def test_a_loss_or_correction_of_the_users_is_tried_before_the_first_step(
    tiny_model: Callable[..., Any], loss: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        _trainer(tiny_model(), _settings(loss=LossSettings(**loss)))


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("mini_batches", [1, 4])
def test_rewarded_answers_become_likelier(mini_batches: int, tiny_model: Callable[..., Any], make_samples: Any) -> None:
    model = tiny_model(initializer_range=0.02)
    config = _settings(mini_batches=mini_batches, optimizer=OptimizerSettings(lr=3e-3))
    trainer = _trainer(model, config)
    samples = make_samples((4, 4, 4, 4))

    def gap() -> float:
        """Mean log-prob of the answers with more than their group's mean reward, less that of the others."""
        sides: dict[bool, list[float]] = {True: [], False: []}
        for sample in _on_policy(model, samples, 0):
            rewards = [other.reward for other in samples if other.group_id == sample.group_id]
            t = sample.trajectory
            if sample.reward != np.mean(rewards):
                sides[sample.reward > np.mean(rewards)].extend(t.logprobs_T[t.loss_mask_T].tolist())
        return float(np.mean(sides[True]) - np.mean(sides[False]))

    before = gap()
    for version in range(6):
        trainer.run(trainer.prepare(_on_policy(model, samples, version), version))
    assert gap() > before + 0.2


def test_learning_rate_zero_changes_no_weight(tiny_model: Callable[..., Any], make_samples: Any) -> None:
    model = tiny_model()
    before = _weights(model)
    trainer = _trainer(model, _settings(optimizer=OptimizerSettings(lr=0.0, weight_decay=0.1)))
    metrics = trainer.run(trainer.prepare(make_samples(UNEQUAL), version=3))
    assert metrics["grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(model), strict=True))


# ---------------------------------------------------------------- nothing to learn


def _partly_silent(make_samples: Any) -> list[BatchSample]:
    """Half of the groups with one reward each: no advantage."""
    samples = make_samples((4,) * 8, max_answer=20)
    return [
        msgspec.structs.replace(one, reward=1.0 if one.group_id % 2 else float(one.sample_index % 2)) for one in samples
    ]


@pytest.mark.parametrize("proximal", ["recompute", "behaviour", "interpolate"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_sequences_without_an_advantage_cost_no_backward_pass_and_change_nothing(
    mini_batches: int, proximal: Any, tiny_model: Callable[..., Any], make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = _partly_silent(make_samples)
    config = _settings(loss=LossSettings(proximal=proximal), mini_batches=mini_batches)
    apart, together = _trainer(tiny_model(), config), _trainer(tiny_model(), config)
    prepared = apart.prepare(samples, version=3)
    silent = [one for mini_batch in prepared.mini_batches for one in mini_batch if one.is_silent]
    assert silent
    assert not any(one.inputs.advantage_N.any() for one in silent)
    assert prepared.metrics["forward_only_share"] == pytest.approx(
        sum(one.packed.num_tokens for one in silent) / prepared.metrics["tokens"]
    )
    backwards: list[bool] = []
    backward = apart.policy.backward
    monkeypatch.setattr(
        apart.policy, "backward", lambda loss, *, is_last: (backwards.append(is_last), backward(loss, is_last=is_last))
    )
    metrics = apart.run(prepared)
    assert len(backwards) == metrics["micro_batches"] - len(silent)
    assert backwards.count(True) == mini_batches  # an update still knows its last gradient
    whole = together.prepare(samples, version=3)
    loud = tuple(tuple(replace(one, is_silent=False) for one in mini_batch) for mini_batch in whole.mini_batches)
    expected = together.run(replace(whole, mini_batches=loud))
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
    ours, theirs = (_weights(trainer.policy.model) for trainer in (apart, together))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("loss", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}])
def test_where_the_loss_has_more_than_advantages_every_sequence_has_a_gradient(loss: Any, make_samples: Any) -> None:
    samples = _partly_silent(make_samples)
    assert prepare_batch(samples, 3, _settings()).metrics["forward_only_share"] > 0
    assert prepare_batch(samples, 3, _settings(loss=LossSettings(**loss))).metrics["forward_only_share"] == 0


def test_a_batch_without_any_advantage_still_makes_its_update(
    tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples = [msgspec.structs.replace(one, reward=1.0) for one in make_samples((4,) * 8)]
    trainer = _trainer(tiny_model(), _settings(optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.0)))
    before = _weights(trainer.policy.model)
    metrics = trainer.run(trainer.prepare(samples, version=3))
    assert (metrics["updates"], metrics["grad_norm"], metrics["forward_only_share"]) == (1.0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(trainer.policy.model), strict=True))
