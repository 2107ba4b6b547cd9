"""Schedules are functions of the step; updates are clipped, or skipped when their gradient is not finite."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from trainer.config import OptimizerSettings
from trainer.optimizer import PolicyOptimizer, learning_rate, make_adamw


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))


def test_warm_up_rises_linearly_to_the_peak() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, step, 10) for step in (1, 2, 4, 5, 10, 99)] == [0.25, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_the_last_step_and_stays_there(schedule: Any) -> None:
    settings = OptimizerSettings(lr=2.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(settings, step, 12) for step in range(1, 15)]
    assert rates[1] == 2.0
    assert rates[11] == rates[13] == pytest.approx(0.2)
    assert rates[6] == pytest.approx(1.1)  # half way
    assert all(a >= b for a, b in itertools.pairwise(rates[1:]))


def test_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    assert learning_rate(OptimizerSettings(lr=1.0, warmup_steps=5, schedule="cosine"), 6, 3) == pytest.approx(0.0)


def test_biases_and_norms_do_not_decay() -> None:
    model = _model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.5), 10)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(1)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"0.weight"}


def test_gradient_is_clipped_by_its_global_norm() -> None:
    model = _model()
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.0, max_grad_norm=1.0), 10)
    seen: list[torch.Tensor] = []
    step = optimizer._adamw.step
    optimizer._adamw.step = lambda *_: seen.extend(p.grad.clone() for p in model.parameters()) or step()  # type: ignore[method-assign]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    result = optimizer.update(1)
    assert result.grad_norm == pytest.approx(3.0 * math.sqrt(28))
    assert float(torch.cat([g.flatten() for g in seen]).norm()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    model = _model()
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.1), 10)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(model.parameters()).grad[0, 0] = bad
    result = optimizer.update(1)
    assert not result.is_applied
    assert optimizer.skipped_updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state_dict()["state"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_restored_state_continues_bit_for_bit() -> None:
    def updates(model: torch.nn.Module, optimizer: PolicyOptimizer, steps: range) -> None:
        for step in steps:
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.sin(parameter.detach() * 10 + step + number)
            optimizer.update(step)

    settings = OptimizerSettings(lr=0.1, warmup_steps=3, schedule="cosine", weight_decay=0.1)
    through = _model()
    updates(through, PolicyOptimizer(through, settings, 8), range(1, 9))
    first = _model()
    saving = PolicyOptimizer(first, settings, 8)
    updates(first, saving, range(1, 5))
    second = _model()
    second.load_state_dict(first.state_dict())
    loading = PolicyOptimizer(second, settings, 8)
    loading.load_state_dict(saving.state_dict())
    updates(second, loading, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), second.parameters(), strict=True))


def test_learning_rate_zero_leaves_the_weights_alone() -> None:
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.0, weight_decay=0.5), 10)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.update(1).is_applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def _with_gradients(model: torch.nn.Module, step: int = 1) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.sin(parameter.detach() * 10 + step + number)


def test_moments_go_by_name_and_only_those_of_updated_parameters_are_there() -> None:
    model = _model()
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1), 10)
    assert optimizer.moments() == {}
    _with_gradients(model)
    model[1].bias.grad = None
    optimizer.update(1)
    moments = optimizer.moments()
    assert sorted(moments) == ["0.bias", "0.weight", "1.weight"]
    assert set(moments["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    again = _model()
    loading = PolicyOptimizer(again, OptimizerSettings(lr=0.1), 10)
    loading.load_moments(lambda name: moments.get(name, {}))
    loaded = loading.moments()
    assert sorted(loaded) == sorted(moments)
    for name, entry in moments.items():
        for kind, value in entry.items():
            assert torch.equal(loaded[name][kind], value), (name, kind)


def test_loaded_moments_go_on_with_this_runs_settings() -> None:
    model = _model()
    before = PolicyOptimizer(model, OptimizerSettings(beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.9), 10)
    _with_gradients(model)
    before.update(1)
    now = PolicyOptimizer(model, OptimizerSettings(beta1=0.1, beta2=0.2, eps=1e-5, weight_decay=0.3), 10)
    now.load_state_dict(before.state_dict())
    decays, plain = now.state_dict()["param_groups"]
    for group in (decays, plain):
        assert (group["betas"], group["eps"]) == ((0.1, 0.2), 1e-5)
    assert (decays["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


def test_adamw_has_the_settings_and_leaves_groups_out_that_are_empty() -> None:
    settings = OptimizerSettings(lr=0.3, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.9)
    matrix, vector = (torch.nn.Parameter(torch.ones(*size)) for size in ((2, 2), (2,)))
    adamw = make_adamw([(matrix, True), (vector, False)], settings)
    assert [(len(group["params"]), group["weight_decay"]) for group in adamw.param_groups] == [(1, 0.9), (1, 0.0)]
    for group in adamw.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.3, (0.5, 0.6), 1e-3, True)
    assert [group["weight_decay"] for group in make_adamw([(vector, False)], settings).param_groups] == [0.0]


def test_parameters_that_need_no_gradient_are_left_alone() -> None:
    model = _model()
    model[0].weight.requires_grad_(False)
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.5), 10)
    kept = model[0].weight.detach().clone()
    for parameter in list(model.parameters())[1:]:
        parameter.grad = torch.ones_like(parameter)
    result = optimizer.update(1)
    assert result.grad_norm == pytest.approx(math.sqrt(12))
    assert torch.equal(model[0].weight, kept)


def test_gradient_below_the_bound_is_not_scaled_and_the_rate_is_the_steps() -> None:
    model = _model()
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.4, warmup_steps=4, max_grad_norm=1e3), 10)
    seen: list[tuple[float, float]] = []
    step = optimizer._adamw.step
    optimizer._adamw.step = lambda *_: (  # type: ignore[method-assign]
        seen.append((float(model[0].weight.grad.max()), optimizer._adamw.param_groups[1]["lr"])) or step()
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    assert optimizer.update(3).lr == pytest.approx(0.3)
    assert seen == [(3.0, pytest.approx(0.3))]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.skipped_updates == 0


def test_state_that_moves_is_counted_in_bytes_once() -> None:
    model = _model()
    optimizer = PolicyOptimizer(model, OptimizerSettings(lr=0.1), 10)
    _with_gradients(model)
    optimizer.update(1)
    values = [value for entry in optimizer.moments().values() for value in entry.values()]
    assert optimizer.move(torch.device("cpu")) == 0
    assert optimizer.move(torch.device("meta")) == sum(value.nbytes for value in values)
    assert all(value.device.type == "meta" for entry in optimizer.moments().values() for value in entry.values())
    assert optimizer.move(torch.device("meta")) == 0
