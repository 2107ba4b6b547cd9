"""Loss and gradient are equation 5 of arXiv 2505.24298, in every mode, against a NumPy oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cut_steps import CUTS, WHOLE
from cut_steps import loss_and_gradient as of_step

from trainer.config import LossSettings, WeightClip
from trainer.objectives.aggregation import token_coefficients
from trainer.objectives.loss import policy_loss
from trainer.objectives.loss_sums import LossSums
from trainer.objectives.port import TokenInputs
from trainer.objectives.proximal import interpolated_proximal

LENGTHS = (3, 7, 1, 5, 4)
GROUPS = (0, 0, 1, 1, 2)
WEIGHTS = {
    "exact": WeightClip(mode="exact", log_clamp=1.2),
    "truncate": WeightClip(mode="truncate", max=1.3),
    "mask": WeightClip(mode="mask", low=0.6, max=1.5),
    "off": WeightClip(mode="off"),
}
MODES = [
    (weight, proximal, aggregation)
    for weight, proximal, aggregation in itertools.product(
        WEIGHTS,
        ("recompute", "interpolate", "behaviour"),
        ("token_mean", "sequence_mean", "group_mean", "constant"),
    )
    if weight != "off" or proximal == "behaviour"
]


def _numbers(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    num = sum(LENGTHS)
    b = -rng.exponential(1.0, num)
    return {
        "b": b,
        "p": b + rng.normal(0, 0.7, num),
        "c": b + rng.normal(0, 0.7, num),
        "A": np.repeat(rng.normal(0, 1, len(LENGTHS)), LENGTHS),
        "s": rng.integers(0, 4, num).astype(float),
        "r": b + rng.normal(0, 0.4, num),
        "H": rng.exponential(1.0, num),
    }


def _shares(settings: LossSettings) -> np.ndarray:
    """Of every token, by hand."""
    tokens_of_group = {g: sum(n for n, h in zip(LENGTHS, GROUPS, strict=True) if h == g) for g in GROUPS}
    shares = {
        "token_mean": [1 / sum(LENGTHS) for _ in LENGTHS],
        "sequence_mean": [1 / (len(LENGTHS) * n) for n in LENGTHS],
        "group_mean": [1 / (3 * tokens_of_group[g]) for g in GROUPS],
        "constant": [1 / (len(LENGTHS) * settings.constant_divisor) for _ in LENGTHS],
    }
    return np.repeat(shares[settings.aggregation], LENGTHS)


def oracle(x: dict[str, np.ndarray], settings: LossSettings, anchor: np.ndarray | None = None) -> float:
    """Equation 5; `anchor` stands in for what the stop-gradient holds fixed (the current log-prob)."""
    c, fixed = x["c"], x["c"] if anchor is None else anchor
    p = {"recompute": x["p"], "behaviour": x["b"], "interpolate": x["b"] + x["s"] / (x["s"] + 1) * (fixed - x["b"])}
    p = p[settings.proximal]
    clip = settings.weight
    w = np.exp(np.clip(p - x["b"], -clip.log_clamp, clip.log_clamp))
    w = {"exact": w, "truncate": np.minimum(w, clip.max), "mask": w * ((w >= clip.low) & (w <= clip.max)), "off": 1}
    w = w[clip.mode]
    u = np.exp(c - p)
    surrogate = np.minimum(u * x["A"], np.clip(u, 1 - settings.eps_low, 1 + settings.eps_high) * x["A"])
    if settings.dual_clip is not None:
        surrogate = np.where(x["A"] < 0, np.maximum(surrogate, settings.dual_clip * x["A"]), surrogate)
    loss = -w * surrogate
    loss = loss + settings.kl_coef * (np.exp(x["r"] - c) - (x["r"] - c) - 1) - settings.entropy_coef * x["H"]
    return float((_shares(settings) * loss).sum())


def _oracle_gradient(x: dict[str, np.ndarray], settings: LossSettings, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x["c"])
    for i in range(len(gradient)):
        up, down = x["c"].copy(), x["c"].copy()
        up[i] += step
        down[i] -= step
        rise = oracle({**x, "c": up}, settings, x["c"]) - oracle({**x, "c": down}, settings, x["c"])
        gradient[i] = rise / (2 * step)
    return gradient


def _inputs(x: dict[str, np.ndarray], settings: LossSettings, members: slice = slice(None)) -> TokenInputs:
    coefficient_N = np.repeat(token_coefficients(LENGTHS, GROUPS, settings), LENGTHS)
    made: dict[str, Any] = {
        "behaviour_N": x["b"],
        "advantage_N": x["A"],
        "staleness_N": x["s"],
        "coefficient_N": coefficient_N,
        "proximal_N": x["p"],
        "reference_N": x["r"],
    }
    return TokenInputs(**{name: torch.from_numpy(value[members]) for name, value in made.items()})


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize(("weight", "proximal", "aggregation"), MODES)
def test_loss_and_gradient_equal_the_oracle_in_every_mode(
    weight: str, proximal: Any, aggregation: Any, dual_clip: float | None
) -> None:
    settings = LossSettings(
        dual_clip=dual_clip,
        proximal=proximal,
        weight=WEIGHTS[weight],
        aggregation=aggregation,
        constant_divisor=6.0,
        eps_low=0.2,
        eps_high=0.3,
        kl_coef=0.05,
        entropy_coef=0.02,
    )
    x = _numbers()
    current_N = torch.from_numpy(x["c"]).requires_grad_()
    entropy_N = torch.from_numpy(x["H"]).requires_grad_()
    loss, _ = policy_loss(current_N, entropy_N, _inputs(x, settings), settings)
    loss.backward()
    assert loss.item() == pytest.approx(oracle(x, settings), rel=1e-9)
    np.testing.assert_allclose(current_N.grad, _oracle_gradient(x, settings), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(entropy_N.grad, -0.02 * _shares(settings), rtol=1e-9)


@pytest.mark.parametrize(("weight", "proximal", "aggregation"), MODES)
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks_in_any_mode(
    weight: str, proximal: Any, aggregation: Any
) -> None:
    settings = LossSettings(
        proximal=proximal, weight=WEIGHTS[weight], aggregation=aggregation, constant_divisor=6.0, kl_coef=0.05,
        dual_clip=1.5,
    )  # fmt: skip
    x = _numbers()
    expected, gradient_N = of_step(x["c"], _inputs(x, settings), LENGTHS, settings, WHOLE)
    assert np.abs(gradient_N).max() > 0.01
    for cut in CUTS.values():
        found, cut_gradient_N = of_step(x["c"], _inputs(x, settings), LENGTHS, settings, cut)
        assert found == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(cut_gradient_N, gradient_N, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_estimator_of_the_divergence_equals_the_oracle(estimator: Any) -> None:
    x = _numbers()
    settings = LossSettings(kl_coef=0.5, kl_estimator=estimator)
    losses = []
    current_N = torch.from_numpy(x["c"]).requires_grad_()
    for one in (settings, LossSettings()):
        losses.append(policy_loss(current_N, torch.zeros(len(x["c"])), _inputs(x, one), one)[0])
    (gradient_N,) = torch.autograd.grad(losses[0] - losses[1], current_N)
    d = x["c"] - x["r"]
    value, slope = {
        "k1": (d, np.ones_like(d)),
        "k2": (d**2 / 2, d),
        "k3": (np.exp(-d) + d - 1, 1 - np.exp(-d)),
    }[estimator]
    assert (losses[0] - losses[1]).item() == pytest.approx(0.5 * value.mean(), rel=1e-6)
    np.testing.assert_allclose(gradient_N, 0.5 * slope / len(d), rtol=1e-6, atol=1e-9)


def test_the_weight_multiplies_the_gradient_and_is_a_constant_for_it() -> None:
    settings = LossSettings(weight=WeightClip(mode="exact"))
    one = torch.ones(1, dtype=torch.float64)
    inputs = TokenInputs(-2.0 * one, one, 0 * one, one, proximal_N=-1.0 * one)
    current_N = (-1.0 * one).requires_grad_()
    loss, _ = policy_loss(current_N, 0 * one, inputs, settings)
    loss.backward()
    assert float(current_N.grad) == pytest.approx(-np.e)  # d/dc of -w u A with u = 1, w = e


def test_clipped_tokens_have_no_gradient_where_the_clip_is_pessimistic() -> None:
    settings = LossSettings(weight=WeightClip(mode="exact"))
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = TokenInputs(zero, torch.tensor([1.0, 1.0, -1.0, -1.0]).double(), zero, zero + 1, proximal_N=zero)
    current_N = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    loss, sums = policy_loss(current_N, zero, inputs, settings)
    loss.backward()
    assert (current_N.grad != 0).tolist() == [False, True, True, False]
    assert sums.metrics(1)["clip_fraction"] == 0.5


def test_dual_clip_takes_the_gradient_of_a_token_that_ran_away_against_a_negative_advantage() -> None:
    settings = LossSettings(weight=WeightClip(mode="exact"), dual_clip=3.0)
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = TokenInputs(zero, torch.tensor([-1.0, -1.0, -1.0, 1.0]).double(), zero, zero + 1, proximal_N=zero)
    current_N = torch.tensor([1.0, 1.2, 5.0, -5.0], dtype=torch.float64, requires_grad=True)  # e^1.2 > 3 > e^1
    loss, sums = policy_loss(current_N, zero, inputs, settings)
    loss.backward()
    assert (current_N.grad != 0).tolist() == [True, False, False, True]
    assert loss.item() == pytest.approx(np.e + 3 + 3 - np.exp(-5))
    assert sums.metrics(1)["dual_clip_share"] == 0.5


def test_masked_tokens_stay_in_the_denominator() -> None:
    settings = LossSettings(weight=WeightClip(mode="mask", low=0.5, max=2.0))
    coefficient = token_coefficients([4], [0], settings)[0]
    zero = torch.zeros(4, dtype=torch.float64)
    behaviour_N = torch.tensor([0.0, 0.0, -3.0, 3.0], dtype=torch.float64)  # the last two weigh e^3 and e^-3
    inputs = TokenInputs(behaviour_N, zero + 1, zero, zero + coefficient, proximal_N=zero)
    loss, sums = policy_loss(zero.clone().requires_grad_(), zero, inputs, settings)
    assert loss.item() == pytest.approx(-2 / 4)
    metrics = sums.metrics(1)
    assert metrics["weight_masked_share"] == 0.5
    assert metrics["ess"] == pytest.approx(0.5)


def test_interpolation_anchors_fresh_tokens_at_the_behaviour_and_stale_ones_near_the_current_policy() -> None:
    b, c = torch.full((4,), -2.0), torch.full((4,), -1.0, requires_grad=True)
    ours = interpolated_proximal(c, b, torch.tensor([0.0, 1.0, 3.0, 99.0]))
    assert not ours.requires_grad
    torch.testing.assert_close(ours, torch.tensor([-2.0, -1.5, -1.25, -1.01]))


def test_missing_proximal_logprobs_mean_the_current_ones_so_that_the_ratio_is_one() -> None:
    settings = LossSettings()
    x = _numbers()
    inputs = _inputs(x, settings)
    no_proximal = TokenInputs(inputs.behaviour_N, inputs.advantage_N, inputs.staleness_N, inputs.coefficient_N)
    current_N = torch.from_numpy(x["c"]).requires_grad_()
    _, sums = policy_loss(current_N, torch.from_numpy(x["H"]), no_proximal, settings)
    metrics = sums.metrics(1)
    assert metrics["ratio_min"] == metrics["ratio_max"] == metrics["ratio_mean"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["kl_proximal_current"] == 0.0


def test_behaviour_mode_is_ordinary_ppo_whatever_the_weight_clip() -> None:
    x = _numbers()
    current_N = torch.from_numpy(x["c"])
    losses = []
    for clip in (WeightClip(mode="off"), WeightClip(mode="truncate", max=0.5), WeightClip(mode="mask", low=2, max=3)):
        settings = LossSettings(proximal="behaviour", weight=clip)
        losses.append(policy_loss(current_N, torch.from_numpy(x["H"]), _inputs(x, settings), settings)[0].item())
    assert len(set(losses)) == 1


def test_far_out_ratios_stay_finite() -> None:
    settings = LossSettings(weight=WeightClip(mode="exact"))
    zero = torch.zeros(2)
    inputs = TokenInputs(torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]), zero, zero + 1, proximal_N=zero)
    current_N = torch.tensor([400.0, -400.0], requires_grad=True)
    loss, sums = policy_loss(current_N, zero, inputs, settings)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current_N.grad).all()
    assert all(np.isfinite(value) for value in sums.metrics(1).values())


def test_metrics_of_micro_batches_add_up_to_those_of_the_whole() -> None:
    settings = LossSettings(weight=WEIGHTS["truncate"], kl_coef=0.1, dual_clip=1.5)
    x = _numbers()

    def sums_of(members: slice) -> LossSums:
        current_N = torch.from_numpy(x["c"][members])
        entropy_N = torch.from_numpy(x["H"][members])
        return policy_loss(current_N, entropy_N, _inputs(x, settings, members), settings)[1]

    whole = sums_of(slice(None)).metrics(1)
    parts = sums_of(slice(0, 4)).plus(sums_of(slice(4, 11))).plus(sums_of(slice(11, None))).metrics(1)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        assert parts[name] == pytest.approx(value, rel=1e-9), name
    assert whole["weight_max"] == pytest.approx(1.3)
    assert 0 < whole["weight_truncated_share"] < 1
    assert whole["kl_behaviour_proximal"] > 0
    w = np.minimum(np.exp(x["p"] - x["b"]), 1.3)
    assert whole["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-6)


class TwoRanks:
    """This rank and one other whose values are known, in the order of the reductions."""

    size = 2

    def __init__(self, other: LossSums) -> None:
        self._others = [
            torch.stack([part[name].double() for name in sorted(part)])
            for part in (other.sums, other.maxima, other.minima)
        ]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + self._others[0]

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, self._others[1])

    def min(self, values: torch.Tensor) -> torch.Tensor:
        return torch.minimum(values, self._others[2])


def test_metrics_over_ranks_are_those_of_all_their_tokens() -> None:
    settings = LossSettings(weight=WEIGHTS["truncate"], kl_coef=0.1, dual_clip=1.5)
    x = _numbers()

    def sums_of(members: slice) -> LossSums:
        current_N, entropy_N = torch.from_numpy(x["c"][members]), torch.from_numpy(x["H"][members])
        return policy_loss(current_N, entropy_N, _inputs(x, settings, members), settings)[1]

    mine, other, whole = sums_of(slice(0, 4)), sums_of(slice(4, None)), sums_of(slice(None)).metrics(1)
    together = mine.over(TwoRanks(other)).metrics(1)  # type: ignore[arg-type]
    assert together == pytest.approx(whole, rel=1e-9)
    empty = mine.emptied().over(TwoRanks(other)).metrics(1)  # type: ignore[arg-type]
    assert empty == pytest.approx(other.metrics(1), rel=1e-9)


@pytest.mark.parametrize(("mode", "name"), [("mask", "weight_masked_share"), ("truncate", "weight_truncated_share")])
def test_weights_at_the_ends_of_their_range_are_neither_masked_nor_truncated(mode: Any, name: str) -> None:
    low, high = (float(torch.tensor(end, dtype=torch.float64).exp()) for end in (-0.5, 0.5))
    settings = LossSettings(weight=WeightClip(mode=mode, low=low, max=high))
    zero = torch.zeros(5, dtype=torch.float64)
    behaviour_N = torch.tensor([0.5, -0.5, 0.51, -0.51, 0.0], dtype=torch.float64)
    inputs = TokenInputs(behaviour_N, zero + 1, zero, zero + 1, proximal_N=zero)
    loss, sums = policy_loss(zero.clone().requires_grad_(), zero, inputs, settings)
    assert sums.metrics(1)[name] == pytest.approx(0.4 if mode == "mask" else 0.2)
    w = [low, high, 0.0, 0.0, 1.0] if mode == "mask" else [low, high, np.exp(-0.51), high, 1.0]
    assert loss.item() == pytest.approx(-sum(w))


def test_log_ratios_count_as_20_at_most_and_weights_as_their_own_clamp() -> None:
    settings = LossSettings(weight=WeightClip(mode="exact", log_clamp=3.0), eps_high=1e12)
    zero = torch.zeros(1, dtype=torch.float64)
    inputs = TokenInputs(zero - 50, zero + 1, zero, zero + 1, proximal_N=zero)
    loss, sums = policy_loss(zero + 90, zero, inputs, settings)
    assert loss.item() == pytest.approx(-np.exp(3.0) * np.exp(20.0))
    metrics = sums.metrics(1)
    assert metrics["weight_max"] == pytest.approx(np.exp(3.0))
    assert metrics["ratio_max"] == pytest.approx(np.exp(20.0))
    assert metrics["kl_behaviour_proximal"] == pytest.approx(np.exp(3.0) - 3.0 - 1.0)
    assert metrics["kl_proximal_current"] == pytest.approx(np.exp(20.0) - 20.0 - 1.0)


def test_effective_sample_size_is_0_where_every_weight_is() -> None:
    settings = LossSettings(weight=WeightClip(mode="mask", low=2.0, max=3.0))
    zero = torch.zeros(2, dtype=torch.float64)
    _, sums = policy_loss(zero, zero, TokenInputs(zero, zero, zero, zero, proximal_N=zero), settings)
    assert (sums.metrics(1)["ess"], sums.metrics(1)["weight_masked_share"]) == (0.0, 1.0)


def test_loss_is_the_mean_over_the_updates_of_the_step() -> None:
    one = torch.ones(2, dtype=torch.float64)
    loss, sums = policy_loss(0 * one, 0 * one, TokenInputs(0 * one, one, 0 * one, one), LossSettings())
    assert sums.metrics(1)["loss"] == pytest.approx(loss.item())
    assert sums.metrics(4)["loss"] == pytest.approx(loss.item() / 4)
    assert sums.metrics(4)["weight_mean"] == 1.0
