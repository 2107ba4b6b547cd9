"""Every built-in loss equals its formula in NumPy, value and gradient, and does not depend on how a step is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cut_steps import CUTS, WHOLE, loss_and_gradient

from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import LossSettings, OptimizerSettings, TrainerSettings, WeightClip
from trainer.data.batch import prepare_batch
from trainer.model.attention import AttentionChoice
from trainer.objectives.aggregation import token_coefficients
from trainer.objectives.loss import policy_loss
from trainer.objectives.port import Sequences, TokenInputs
from trainer.objectives.registry import OBJECTIVES, loss_of
from trainer.objectives.step_statistics import step_statistics
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

LENGTHS = (3, 7, 1, 5, 4)
OFF: dict[str, Any] = {"proximal": "behaviour", "weight": WeightClip(mode="off")}
Numbers = dict[str, np.ndarray]
"""Log-probs b, p, c, and at the start of the step; advantages A; f: what a stop-gradient holds fixed of c."""


def _by_sequence(values: np.ndarray, reduce: Callable[[np.ndarray], float]) -> np.ndarray:
    parts = np.split(values, np.cumsum(LENGTHS)[:-1])
    return np.repeat([reduce(part) for part in parts], LENGTHS)


def _clipped(ratio: np.ndarray, advantage: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)


def _gspo(x: Numbers, o: Any) -> np.ndarray:
    return -_clipped(
        _by_sequence(np.exp(_by_sequence(x["c"] - x["p"], np.mean)), np.mean), x["A"], 1 - o.eps_low, 1 + o.eps_high
    )


def _cispo(x: Numbers, o: Any) -> np.ndarray:
    return -np.minimum(np.exp(x["f"] - x["p"]), o.max_ratio) * x["A"] * x["c"]


def _sapo(x: Numbers, o: Any) -> np.ndarray:
    t = np.where(x["A"] > 0, o.temperature_positive, o.temperature_negative)
    return -4 / t / (1 + np.exp(-t * (np.exp(x["c"] - x["p"]) - 1))) * x["A"]


def _dppo(x: Numbers, o: Any) -> np.ndarray:
    rise = np.exp(x["f"]) - np.exp(x["b"])
    keep = ~(((x["A"] > 0) & (rise > o.max_increase)) | ((x["A"] < 0) & (rise < -o.max_decrease)))
    return -1.0 * keep * np.exp(x["c"] - x["b"]) * x["A"] + o.k2_coef * (x["c"] - x["b"]) ** 2


def _vespo(x: Numbers, o: Any) -> np.ndarray:
    log_w = np.clip(_by_sequence(np.clip(x["f"] - x["b"], -20, 20), np.sum), np.log(1e-8), 20)
    good = np.exp(o.lambda_positive) * np.exp(log_w) ** o.k_positive * np.exp(-o.lambda_positive * np.exp(log_w))
    bad = np.exp(o.lambda_negative) * np.exp(log_w) ** o.k_negative * np.exp(-o.lambda_negative * np.exp(log_w))
    return -np.where(x["A"] >= 0, good, bad) * x["A"] * x["c"]


def _bapo(x: Numbers, o: Any) -> np.ndarray:
    start = np.exp(x["start"] - x["b"])
    low, high = o.low_start, o.high_start

    def is_short() -> bool:
        effective = np.where(x["A"] > 0, np.minimum(start, high), np.maximum(start, low)) * x["A"]
        return effective[effective > 0].sum() / np.abs(effective).sum() < o.target_share

    while is_short() and low < o.low_end:
        low = min(low + o.low_step, o.low_end)
    while is_short() and high < o.high_end:
        high = min(high + o.high_step, o.high_end)
    surrogate = _clipped(np.exp(x["c"] - x["b"]), x["A"], low, high)
    return -np.where(x["A"] < 0, np.maximum(surrogate, o.dual_clip * x["A"]), surrogate)


CASES: dict[str, tuple[Callable[[Numbers, Any], np.ndarray], dict[str, Any], dict[str, Any]]] = {
    "gspo": (_gspo, {"eps_low": 0.1, "eps_high": 0.15}, {}),
    "cispo": (_cispo, {"max_ratio": 1.2}, {}),
    "sapo": (_sapo, {"temperature_positive": 1.5, "temperature_negative": 2.5}, {}),
    "dppo": (_dppo, {"max_increase": 0.1, "max_decrease": 0.05, "k2_coef": 0.02}, OFF),
    "vespo": (_vespo, {"k_positive": 1.5}, OFF),
    "bapo": (_bapo, {"target_share": 0.58, "dual_clip": 1.8}, OFF),
}
"""Oracle, options and other settings of each loss (decoupled_ppo: test_loss.py)."""


def _numbers(is_behaviour: bool, seed: int = 0) -> Numbers:
    rng = np.random.default_rng(seed)
    num = sum(LENGTHS)
    b = -rng.exponential(1.0, num)
    p = b if is_behaviour else b + rng.normal(0, 0.3, num)
    c = b + rng.normal(0, 0.4, num)
    start = b + rng.normal(0, 0.4, num) if is_behaviour else p
    return {"b": b, "p": p, "start": start, "c": c, "f": c, "A": np.repeat([1.3, -0.7, 0.4, -1.1, 0.9], LENGTHS)}


def _inputs(x: Numbers, members: slice = slice(None), sequences: slice = slice(None)) -> TokenInputs:
    lengths = LENGTHS[sequences]
    coefficient_N = np.repeat(token_coefficients(LENGTHS, range(5), LossSettings(aggregation="sequence_mean")), LENGTHS)
    tensors = [
        torch.from_numpy(value[members].copy()) for value in (x["b"], x["A"], 0 * x["A"], coefficient_N, x["start"])
    ]
    ids_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TokenInputs(*tensors, sequences=Sequences(ids_N, len(lengths)))


def _with_statistics(inputs: TokenInputs, settings: LossSettings) -> TokenInputs:
    return replace(inputs, step=step_statistics(loss_of(settings), [inputs], list))


def test_every_loss_has_an_oracle() -> None:
    assert set(OBJECTIVES) == {*CASES, "decoupled_ppo"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", CASES)
def test_loss_and_gradient_equal_the_oracle(kind: str, seed: int) -> None:
    oracle, options, others = CASES[kind]
    settings = LossSettings(kind=kind, options=options, **others)
    parsed = loss_of(settings).options
    x = _numbers(settings.proximal == "behaviour", seed)
    inputs = _with_statistics(_inputs(x), settings)
    # the weight of dppo is 1, so that its penalty may be in the product
    weight = np.ones(sum(LENGTHS)) if others else np.minimum(np.exp(x["p"] - x["b"]), 5.0)

    def value(c: np.ndarray) -> float:
        return float((inputs.coefficient_N.numpy() * weight * oracle({**x, "c": c}, parsed)).sum())

    current_N = torch.from_numpy(x["c"].copy()).requires_grad_()
    loss, sums = policy_loss(current_N, 0 * current_N.detach(), inputs, settings)
    loss.backward()
    assert loss.item() == pytest.approx(value(x["c"]), rel=1e-6)
    step, gradient = 1e-6, []
    for i in range(len(x["c"])):
        shift = step * (np.arange(len(x["c"])) == i)
        gradient.append((value(x["c"] + shift) - value(x["c"] - shift)) / (2 * step))
    np.testing.assert_allclose(current_N.grad, gradient, rtol=1e-6, atol=1e-9)
    assert all(np.isfinite(number) for number in sums.metrics(1).values())


def _gspo_metrics(x: Numbers, o: Any) -> Numbers:
    ratio = np.exp(_by_sequence(x["c"] - x["p"], np.mean))
    clipped = np.clip(ratio, 1 - o.eps_low, 1 + o.eps_high)
    return {"clip_fraction": clipped * x["A"] < ratio * x["A"]}


def _sapo_metrics(x: Numbers, o: Any) -> Numbers:
    t = np.where(x["A"] > 0, o.temperature_positive, o.temperature_negative)
    gate = 1 / (1 + np.exp(-t * (np.exp(x["c"] - x["p"]) - 1)))
    return {"gate_slope": 4 * gate * (1 - gate)}


def _dppo_metrics(x: Numbers, o: Any) -> Numbers:
    rise = np.exp(x["c"]) - np.exp(x["b"])
    dropped = ((x["A"] > 0) & (rise > o.max_increase)) | ((x["A"] < 0) & (rise < -o.max_decrease))
    return {"clip_fraction": dropped}


def _vespo_metrics(x: Numbers, o: Any) -> Numbers:
    with_one = _vespo({**x, "A": np.where(x["A"] >= 0, 1e-9, -1e-9), "c": np.ones_like(x["c"])}, o)
    return {"phi_mean": np.abs(with_one) * 1e9}


def _bapo_metrics(x: Numbers, o: Any) -> Numbers:
    ratio = np.exp(x["c"] - x["b"])
    low, high = x["low"], x["high"]
    cut = (x["A"] < 0) & (ratio > o.dual_clip)
    clipped = np.clip(ratio, low, high) * x["A"] < ratio * x["A"]
    return {"clip_fraction": clipped, "dual_clip_share": cut, "clip_low": low, "clip_high": high}


METRICS: dict[str, Callable[[Numbers, Any], Numbers]] = {
    "gspo": _gspo_metrics, "cispo": lambda x, o: {"clip_fraction": np.exp(x["c"] - x["p"]) > o.max_ratio},
    "sapo": _sapo_metrics, "dppo": _dppo_metrics, "vespo": _vespo_metrics, "bapo": _bapo_metrics,
}  # fmt: skip


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_what_a_loss_reports_equals_the_oracle_also_where_an_advantage_is_0(kind: str, has_zeros: bool) -> None:
    _, options, others = CASES[kind]
    settings = LossSettings(kind=kind, options=options, **others)
    x = _numbers(settings.proximal == "behaviour", seed=1)
    x["c"] = x["f"] = x["c"] + np.where(np.arange(len(x["c"])) % 6 == 0, 0.7, 0.0)
    if has_zeros:
        x["A"] = np.where(np.arange(len(x["A"])) % 3 == 0, 0.0, x["A"])
    inputs = _with_statistics(_inputs(x), settings)
    if kind == "bapo":
        bounds = inputs.step["bapo"]
        x |= {name: np.full(len(x["c"]), bounds[name]) for name in ("low", "high")}
    _, sums = policy_loss(torch.from_numpy(x["c"]), torch.zeros(sum(LENGTHS)), inputs, settings)
    metrics = sums.metrics(1)
    for name, values in METRICS[kind](x, loss_of(settings).options).items():
        assert metrics[name] == pytest.approx(float(np.mean(values)), rel=1e-6), name


def test_bounds_of_a_loss_are_inside_them() -> None:
    """Chosen as what the token has, bit for bit."""
    b, c = torch.tensor([-2.0, -1.0]).double(), torch.tensor([-1.5, -1.75]).double()
    tokens = TokenInputs(b, torch.tensor([1.0, -1.0]).double(), 0 * b, 0 * b, b)
    rise_N, ratio_N = c.exp() - b.exp(), (c - b).exp()
    for change, dropped in ((0.0, [False, False]), (-1e-9, [True, True])):
        options = {"max_increase": float(rise_N[0]) + change, "max_decrease": -float(rise_N[1]) + change}
        chosen = loss_of(LossSettings(kind="dppo", options=options, **OFF))
        found = chosen.objective.loss(c, tokens, chosen.options)
        assert found.token_metrics["clip_fraction"].tolist() == dropped
        chosen = loss_of(LossSettings(kind="cispo", options={"max_ratio": float(ratio_N[0]) + change}))
        found = chosen.objective.loss(c, tokens, chosen.options)
        assert found.token_metrics["clip_fraction"].tolist() == [dropped[0], False]
    against = replace(tokens, advantage_N=-tokens.advantage_N.abs(), step={"bapo": {"low": 0.5, "high": 2.0}})
    for change, is_cut in ((0.0, False), (-1e-9, True)):
        options = {"dual_clip": float(ratio_N[0]) + change}
        chosen = loss_of(LossSettings(kind="bapo", options=options, **OFF))
        found = chosen.objective.loss(c, against, chosen.options)
        assert found.token_metrics["dual_clip_share"].tolist() == [is_cut, False]


@pytest.mark.parametrize("kind", CASES)
def test_some_tokens_are_cut_in_the_cases_of_the_oracle(kind: str) -> None:
    _, options, others = CASES[kind]
    settings = LossSettings(kind=kind, options=options, **others)
    x = _numbers(settings.proximal == "behaviour")
    inputs = _with_statistics(_inputs(x), settings)
    _, sums = policy_loss(torch.from_numpy(x["c"]), torch.zeros(sum(LENGTHS)), inputs, settings)
    metrics = sums.metrics(1)
    if "clip_fraction" in metrics:
        assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_far_out_ratios_stay_finite(kind: str) -> None:
    others = OFF if loss_of(LossSettings(kind=kind)).needs.proximal == "behaviour" else {}
    num = sum(LENGTHS)
    for distance in (-500.0, 500.0):
        b = np.full(num, -1.0)
        x = {"b": b, "start": b, "A": np.repeat([1.0, -1.0, 1.0, -1.0, 1.0], LENGTHS)}
        current_N = torch.full((num,), distance, dtype=torch.float64).requires_grad_()
        settings = LossSettings(kind=kind, **others)
        loss, sums = policy_loss(current_N, torch.zeros(num), _with_statistics(_inputs(x), settings), settings)
        loss.backward()
        assert loss.isfinite()
        assert current_N.grad.isfinite().all()
        assert all(np.isfinite(value) for value in sums.metrics(1).values())


# ---------------------------------------------------------------- however a step is cut


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", CASES)
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks_in_float64(kind: str, cut: str) -> None:
    """The bounds of bapo are from sums over ranks."""
    _, options, others = CASES[kind]
    settings = LossSettings(kind=kind, options=options, aggregation="sequence_mean", **others)
    x = _numbers(settings.proximal == "behaviour")
    expected, gradient_N = loss_and_gradient(x["c"], _inputs(x), LENGTHS, settings, WHOLE)
    found, cut_gradient_N = loss_and_gradient(x["c"], _inputs(x), LENGTHS, settings, CUTS[cut])
    assert np.abs(gradient_N).max() > 0.01
    assert found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(cut_gradient_N, gradient_N, rtol=1e-12, atol=1e-15)


def _settings(kind: str, **changes: Any) -> TrainerSettings:
    others = OFF if loss_of(LossSettings(kind=kind)).needs.proximal == "behaviour" else {}
    options = {} if kind == "decoupled_ppo" else CASES[kind][1]
    loss = LossSettings(kind=kind, options=options, aggregation="sequence_mean", **others)
    return TrainerSettings(
        **{"loss": loss, "optimizer": OptimizerSettings(lr=0.0), "micro_batch_tokens": 64, **changes}
    )


def _step(model: Any, settings: TrainerSettings) -> TrainStep:
    setup = Setup(settings, temperature=0.9, num_steps=10, attention=AttentionChoice("sdpa", "t"), ranks=Ranks.alone())
    ready_model(model, setup)
    return TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)


def _gradient(step: TrainStep, samples: Any, num_ranks: int) -> torch.Tensor:
    """Mean over the updates of a step that moves nothing, each of them the sum of its ranks' parts."""
    step.policy.zero_grad()
    made = [prepare_batch(samples, 3, step.settings, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    starts = [step._proximal(prepared) for prepared in made]
    parts = [
        step._inputs(micro_batch, start[number, place])
        for prepared, start in zip(made, starts, strict=True)
        for number, mini_batch in enumerate(prepared.mini_batches)
        for place, micro_batch in enumerate(mini_batch)
        if start and not micro_batch.is_dummy
    ]
    statistics = step_statistics(step._loss, parts, list)
    for prepared, start in zip(made, starts, strict=True):
        for number, mini_batch in enumerate(prepared.mini_batches):
            for place, micro_batch in enumerate(mini_batch):
                step._backward(micro_batch, start.get((number, place)), statistics, is_last=False)
    found = torch.cat([p.grad.flatten() for p in step.policy.model.parameters() if p.grad is not None])
    return found / len(made[0].mini_batches)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return float((ours - theirs).norm() / theirs.norm()) < 1e-5


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradient_does_not_depend_on_micro_batches_mini_batches_or_ranks(
    kind: str, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples = make_samples((4, 2, 3, 4, 1))
    whole = _gradient(_step(tiny_model(), _settings(kind, micro_batch_tokens=10_000)), samples, 1)
    assert whole.norm() > 1e-4
    for tokens, num_ranks, updates in ((20, 1, 1), (64, 1, 2), (20, 3, 1), (10_000, 2, 1), (64, 2, 3), (20, 1, 5)):
        settings = _settings(kind, micro_batch_tokens=tokens, mini_batches=updates)
        cut = _gradient(_step(tiny_model(), settings), samples, num_ranks)
        assert _close(cut, whole), (tokens, num_ranks, updates)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_mean_loss_and_metrics_do_not_depend_on_mini_batches(
    kind: str, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, found = make_samples((4, 2, 3, 4, 1)), []
    for mini_batches in (1, 2, 5):
        step = _step(tiny_model(), _settings(kind, mini_batches=mini_batches))
        found.append(step.run(step.prepare(samples, version=3)))
    own = loss_of(_settings(kind).loss).objective
    names: Sequence[str] = [
        "loss",
        *[n for n in ("clip_fraction", "phi_mean", "gate_slope", "clip_low") if n in found[0]],
    ]
    assert len(names) > 1, own.name
    for other in found[1:]:
        for name in names:
            assert other[name] == pytest.approx(found[0][name], rel=1e-5), name
