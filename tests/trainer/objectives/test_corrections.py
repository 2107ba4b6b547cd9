"""Every correction equals its formula in NumPy, multiplies with all others, however a step is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cut_steps import CUTS, WHOLE, loss_and_gradient

from trainer.backends.port import Setup
from trainer.backends.torch_single import TorchBackend
from trainer.config import CorrectionSettings, LossSettings, OptimizerSettings, TrainerSettings, WeightClip
from trainer.model.attention import AttentionChoice
from trainer.objectives.loss import policy_loss
from trainer.objectives.port import Sequences, TokenInputs
from trainer.objectives.registry import CORRECTIONS, loss_faults, loss_of
from trainer.objectives.step_statistics import step_statistics
from trainer.ranks import Ranks
from trainer.step import TrainStep, ready_model

LENGTHS = (3, 7, 1, 5, 4)
NUM = sum(LENGTHS)
Numbers = dict[str, np.ndarray]


def _by_sequence(values: np.ndarray, reduce: Callable[[np.ndarray], Any]) -> np.ndarray:
    parts = np.split(values, np.cumsum(LENGTHS)[:-1])
    return np.repeat([reduce(part) for part in parts], LENGTHS)


def _binary_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def _kpop(x: Numbers, o: Any) -> np.ndarray:
    p, q = np.exp(x["p"]), np.exp(x["b"])
    return np.maximum(_binary_kl(p, q), _binary_kl(q, p)) <= o.max_kl


def _icepop(x: Numbers, o: Any) -> np.ndarray:
    ratio = np.exp(x["p"] - x["b"])
    return (o.low <= ratio) & (ratio <= o.high)


def _veto(x: Numbers, o: Any) -> np.ndarray:
    ratio = np.exp(x["p"] - x["b"])
    low, high = _by_sequence(ratio, np.min), _by_sequence(ratio, np.max)
    return (low >= o.min_ratio) & (True if o.max_ratio is None else high <= o.max_ratio)


def _geometric_mask(x: Numbers, o: Any) -> np.ndarray:
    mean = _by_sequence(np.exp(x["p"] - x["b"]), lambda part: np.prod(part) ** (1 / len(part)))
    return (o.low <= mean) & (mean <= o.high)


def _sequence_rejection(x: Numbers, o: Any) -> np.ndarray:
    product = _by_sequence(np.exp(x["p"] - x["b"]), np.prod)
    return (o.low <= product) & (product <= o.high)


def _kl_rejection(x: Numbers, o: Any) -> np.ndarray:
    ratio = np.exp(x["p"] - x["b"])
    kl = np.log(ratio) ** 2 / 2 if o.estimator == "k2" else ratio - 1 - np.log(ratio)
    reduced = {
        "token": kl,
        "sequence_mean": _by_sequence(kl, np.mean),
        "sequence_sum": _by_sequence(kl, np.sum),
        "sequence_max": _by_sequence(kl, np.max),
    }
    return reduced[o.level] <= o.max_kl


def _opsm(x: Numbers, o: Any) -> np.ndarray:
    return ~((x["A"] < 0) & (_by_sequence(x["b"] - x["c"], np.mean) > o.max_kl))


def _m2po(x: Numbers, o: Any) -> np.ndarray:
    squares = (x["p"] - x["b"]) ** 2
    keep = np.ones(NUM, bool)
    for index in np.argsort(-squares):  # the largest goes first
        if squares[keep].mean() < o.max_second_moment:
            break
        keep[index] = False
    return keep


def _sequence_weight(x: Numbers, o: Any) -> np.ndarray:
    reduce = np.sum if o.reduce == "sum" else np.mean
    return np.minimum(np.exp(_by_sequence(x["p"] - x["b"], reduce)), o.max)


CASES: list[tuple[str, dict[str, Any], Callable[[Numbers, Any], np.ndarray]]] = [
    ("icepop", {"low": 0.7, "high": 1.4}, _icepop),
    ("kpop", {"max_kl": 0.02}, _kpop),
    ("veto", {"min_ratio": 0.5}, _veto),
    ("veto", {"min_ratio": 0.4, "max_ratio": 1.6}, _veto),
    ("geometric_mask", {"low": 0.95, "high": 1.2}, _geometric_mask),
    ("sequence_rejection", {"low": 0.6, "high": 1.5}, _sequence_rejection),
    ("kl_rejection", {"max_kl": 0.05, "level": "token"}, _kl_rejection),
    ("kl_rejection", {"max_kl": 0.05, "estimator": "k2"}, _kl_rejection),
    ("kl_rejection", {"max_kl": 0.2, "level": "sequence_max"}, _kl_rejection),
    ("kl_rejection", {"max_kl": 0.3, "level": "sequence_sum"}, _kl_rejection),
    ("opsm", {"max_kl": 0.02}, _opsm),
    ("m2po", {"max_second_moment": 0.06}, _m2po),
    ("no_eos_mask", {}, lambda x, o: x["cut"] == 0),
    ("staleness_mask", {"max": 1}, lambda x, o: x["s"] <= o.max),
    ("staleness_weight", {"decay": 0.8}, lambda x, o: o.decay ** x["s"]),
    ("sequence_weight", {"max": 1.2}, _sequence_weight),
    ("sequence_weight", {"max": 1.05, "reduce": "mean"}, _sequence_weight),
    ("token_weight", {"max": 1.2}, lambda x, o: np.minimum(np.exp(x["p"] - x["b"]), o.max)),
]


def _numbers(seed: int) -> Numbers:
    rng = np.random.default_rng(seed)
    b = -rng.exponential(1.0, NUM) - 1e-3
    return {
        "b": b,
        "p": np.minimum(b + rng.normal(0, 0.35, NUM), -1e-3),
        "c": np.minimum(b + rng.normal(0, 0.35, NUM), -1e-3),
        "A": np.repeat([1.3, -0.7, -0.4, -1.1, 0.9], LENGTHS),
        "s": rng.integers(0, 4, NUM).astype(float),
        "cut": np.repeat([0, 1, 0, 0, 1], LENGTHS),
    }


def _inputs(x: Numbers) -> TokenInputs:
    tensors = [torch.from_numpy(x[name].copy()) for name in ("b", "A", "s")]
    ids_N = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
    return TokenInputs(
        *tensors,
        torch.ones(NUM, dtype=torch.float64),
        torch.from_numpy(x["p"].copy()),
        sequences=Sequences(ids_N, 5),
        is_cut_N=torch.from_numpy(x["cut"] == 1),
    )


def _settings(*corrections: tuple[str, dict[str, Any]], **changes: Any) -> LossSettings:
    entries = tuple(CorrectionSettings(kind=kind, options=options) for kind, options in corrections)
    is_weighted = any(CORRECTIONS[kind].is_weight for kind, _ in corrections)
    weight = WeightClip(mode="off" if is_weighted else "truncate", max=1.3)
    return LossSettings(**{"corrections": entries, "weight": weight, **changes})


def _weights(x: Numbers, settings: LossSettings) -> tuple[np.ndarray, dict[str, float]]:
    """Weight of each token, read off the gradient of a loss that is -w c."""
    current_N = torch.from_numpy(x["c"].copy()).requires_grad_()
    inputs = _inputs(x)
    inputs = replace(inputs, step=step_statistics(loss_of(settings), [inputs], list))
    loss, sums = policy_loss(current_N, torch.zeros(NUM), inputs, settings)
    (gradient_N,) = torch.autograd.grad(loss, current_N)
    u = np.exp(x["c"] - x["p"])
    return gradient_N.numpy() / (-u * x["A"]), sums.metrics(1)


def test_every_correction_has_an_oracle() -> None:
    with_versions = {name for name, one in CORRECTIONS.items() if one.needs.versions}  # test_versions.py
    assert {kind for kind, _, _ in CASES} == set(CORRECTIONS) - with_versions


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "options", "oracle"), CASES)
def test_correction_equals_the_oracle(kind: str, options: dict[str, Any], oracle: Any, seed: int) -> None:
    x, settings = _numbers(seed), _settings((kind, options), eps_low=0.99, eps_high=100.0)
    ((correction, parsed),) = loss_of(settings).corrections
    expected = oracle(x, parsed)
    found, metrics = _weights(x, settings)
    w = 1.0 if correction.is_weight else np.minimum(np.exp(x["p"] - x["b"]), 1.3)
    np.testing.assert_allclose(found, expected * w, rtol=1e-6, atol=1e-12)
    if expected.dtype == bool:
        assert metrics[f"{kind}_masked_share"] == pytest.approx(1 - expected.mean())
    else:
        assert metrics[f"{kind}_mean"] == pytest.approx(expected.mean())


@pytest.mark.parametrize(("kind", "options", "oracle"), CASES)
def test_correction_acts_on_some_tokens_of_the_cases_and_not_on_all(kind: str, options: Any, oracle: Any) -> None:
    ((_, parsed),) = loss_of(_settings((kind, options))).corrections
    found = np.concatenate([oracle(_numbers(seed), parsed) for seed in range(4)])
    assert len(np.unique(found)) > 1


PAIRS = [
    (first, second)
    for first, second in itertools.combinations(CASES, 2)
    if first[0] != second[0] and not (CORRECTIONS[first[0]].is_weight and CORRECTIONS[second[0]].is_weight)
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_any_two_corrections_multiply(first: Any, second: Any) -> None:
    x = _numbers(0)
    settings = _settings(first[:2], second[:2], eps_low=0.99, eps_high=100.0)
    parsed = [options for _, options in loss_of(settings).corrections]
    w = 1.0 if settings.weight.mode == "off" else np.minimum(np.exp(x["p"] - x["b"]), 1.3)
    expected = first[2](x, parsed[0]) * second[2](x, parsed[1]) * w
    np.testing.assert_allclose(_weights(x, settings)[0], expected, rtol=1e-6, atol=1e-12)
    assert list(loss_faults(settings)) == []


def test_masked_tokens_keep_the_penalty_that_is_not_weighted() -> None:
    off: dict[str, Any] = {"proximal": "behaviour", "weight": WeightClip(mode="off")}
    settings = LossSettings(
        kind="dppo", options={"k2_coef": 0.5}, corrections=(CorrectionSettings(kind="no_eos_mask"),), **off
    )
    x = _numbers(0)
    x["cut"][:] = 1
    loss, _ = policy_loss(torch.from_numpy(x["c"]), torch.zeros(NUM), _inputs(x), settings)
    assert loss.item() == pytest.approx(0.5 * ((x["c"] - x["b"]) ** 2).sum())


def test_without_recomputed_logprobs_the_current_ones_are_compared() -> None:
    x = _numbers(1)
    settings = _settings(("icepop", {"low": 0.7, "high": 1.4}), proximal="behaviour", weight=WeightClip(mode="off"))
    inputs = _inputs(x)
    alone = TokenInputs(inputs.behaviour_N, inputs.advantage_N, inputs.staleness_N, inputs.coefficient_N)
    _, sums = policy_loss(torch.from_numpy(x["c"]), torch.zeros(NUM), alone, settings)
    ratio = np.exp(x["c"] - x["b"])
    assert sums.metrics(1)["icepop_masked_share"] == pytest.approx(1 - ((ratio >= 0.7) & (ratio <= 1.4)).mean())


def test_kpop_takes_certain_tokens() -> None:
    x = _numbers(0)
    x["b"][:], x["p"][:], x["c"][:] = 0.0, 0.0, 0.0
    x["p"][:4] = -700.0
    found, metrics = _weights(x, _settings(("kpop", {"max_kl": 0.1})))
    assert metrics["kpop_masked_share"] == pytest.approx(4 / NUM)
    assert np.isfinite(found[4:]).all()


def test_m2po_drops_nothing_near_and_everything_where_no_token_is_near() -> None:
    x = _numbers(0)
    for bound, share in ((10.0, 0.0), (1e-12, 1.0)):
        settings = _settings(("m2po", {"max_second_moment": bound}))
        assert _weights(x, settings)[1]["m2po_masked_share"] == share


# ---------------------------------------------------------------- what does not fit together


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (LossSettings(corrections=(CorrectionSettings(kind="nothing"),)), "corrections.0.kind", "no correction"),
        (_settings(("veto", {}), ("veto", {})), "corrections.1.kind", "twice"),
        (_settings(("kpop", {})), "corrections.0.options.max_kl", "required"),
        (_settings(("icepop", {"low": 2.0})), "corrections.0.options", "low (2) must be less than 1"),
        (_settings(("opsm", {"max_kl": 0})), "corrections.0.options.max_kl", "greater than 0"),
        (_settings(("sequence_weight", {}), weight=WeightClip()), "weight.mode", "both weight by exp(p - b)"),
        (_settings(("sequence_weight", {}), proximal="behaviour"), "proximal", "already part of the ratio"),
    ],
)
def test_combination_that_cannot_be_is_one_fault(settings: LossSettings, key: str, words: str) -> None:
    (fault,) = loss_faults(settings)
    assert fault.key == f"trainer.loss.{key}"
    assert words in fault.what


# ---------------------------------------------------------------- however a step is cut


TOGETHER = [case for case in CASES if case[0] in ("icepop", "geometric_mask", "opsm", "m2po", "staleness_weight")]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("cases", [[case] for case in CASES] + [TOGETHER])
def test_corrected_loss_and_gradient_do_not_depend_on_micro_batches_or_ranks(cases: list[Any], cut: str) -> None:
    """In float64. The statistics of m2po are sums over ranks."""
    x, settings = _numbers(0), _settings(*(case[:2] for case in cases))
    expected, gradient_N = loss_and_gradient(x["c"], _inputs(x), LENGTHS, settings, WHOLE)
    found, cut_gradient_N = loss_and_gradient(x["c"], _inputs(x), LENGTHS, settings, CUTS[cut])
    assert np.abs(gradient_N).max() > 0.1
    assert found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(cut_gradient_N, gradient_N, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_corrections_do_not_depend_on_the_cut_of_a_step(
    mini_batches: int, tiny_model: Callable[..., Any], make_samples: Any
) -> None:
    samples, found = make_samples((4, 2, 3, 4, 1)), []
    loss = _settings(
        ("icepop", {"low": 0.05, "high": 20.0}),
        ("veto", {"min_ratio": 0.05}),
        ("geometric_mask", {"low": 0.2, "high": 10.0}),
        ("staleness_weight", {}),
        ("opsm", {"max_kl": 1.0}),
        ("m2po", {"max_second_moment": 0.5}),
        aggregation="sequence_mean",
    )
    for cut_in, tokens in ((1, 10_000), (mini_batches, 64), (mini_batches, 20)):
        settings = TrainerSettings(
            loss=loss, mini_batches=cut_in, micro_batch_tokens=tokens, optimizer=OptimizerSettings(lr=0.0)
        )
        model = tiny_model()
        attention = AttentionChoice("sdpa", "test")
        setup = Setup(settings, temperature=0.9, num_steps=10, attention=attention, ranks=Ranks.alone())
        ready_model(model, setup)
        step = TrainStep(TorchBackend(model, setup), setup, groups_per_step=8)
        found.append(step.run(step.prepare(samples, version=3)))
    shares = [f"{name}_masked_share" for name in ("icepop", "veto", "geometric_mask", "opsm", "m2po")]
    assert all(0 < found[0][name] < 1 for name in shares), found[0]
    names = ["loss", *shares, "staleness_weight_mean"]
    for other in found[1:]:
        for name in names:
            assert other[name] == pytest.approx(found[0][name], rel=1e-5, abs=1e-9), name


# ---------------------------------------------------------------- ends of windows, and far out


def _factor(kind: str, drift: list[float], lengths: list[int] | None = None, **options: Any) -> list[float]:
    """What a correction makes of these log-ratios, one sequence per token unless said otherwise."""
    drift_N = torch.tensor(drift, dtype=torch.float64)
    lengths = lengths or [1] * len(drift)
    ids_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    zero_N = torch.zeros(len(drift), dtype=torch.float64)
    tokens = TokenInputs(
        zero_N, zero_N - 1.0, zero_N, zero_N, sequences=Sequences(ids_N, len(lengths)), drift_N=drift_N,
        current_N=drift_N,
    )  # fmt: skip
    one = CORRECTIONS[kind]
    found: list[float] = one.factor(tokens, one.options(**options)).double().tolist()
    return found


@pytest.mark.parametrize("kind", ["icepop", "geometric_mask", "sequence_rejection"])
def test_ends_of_a_window_are_inside_it(kind: str) -> None:
    low, high = (float(torch.tensor(end, dtype=torch.float64).exp()) for end in (-0.7, 0.9))
    assert _factor(kind, [-0.7, 0.9, -0.7001, 0.9001], low=low, high=high) == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["icepop", "geometric_mask", "sequence_rejection"])
def test_log_ratio_beyond_20_counts_as_20(kind: str) -> None:
    low, high = (float(torch.tensor(end, dtype=torch.float64).exp()) for end in (-20.0, 20.0))
    assert _factor(kind, [-900.0, 900.0], low=low, high=high) == [1, 1]


def test_weight_of_a_sequence_is_finite_however_far_out_it_is() -> None:
    assert _factor("sequence_weight", [-900.0, 900.0], max=1e12) == pytest.approx([np.exp(-20.0), np.exp(20.0)])


def test_bound_of_a_divergence_stays_and_what_is_beyond_it_goes() -> None:
    bound = 0.5 - np.log(1.5)  # k3 of a ratio of 1.5
    close = {"level": "token", "estimator": "k3"}
    assert _factor("kl_rejection", [np.log(1.5)], max_kl=bound * (1 + 1e-9), **close) == [1]
    assert _factor("kl_rejection", [np.log(1.5)], max_kl=bound * (1 - 1e-9), **close) == [0]
    assert _factor("kl_rejection", [2.0, -2.0, 2.1], max_kl=2.0, level="token", estimator="k2") == [1, 1, 0]
    far = {"level": "token", "estimator": "k2"}
    assert _factor("kl_rejection", [25.0, -25.0], max_kl=200.0, **far) == [1, 1], "a log-ratio counts as 20 at most"
    assert _factor("opsm", [-0.5, -0.5001], max_kl=0.5) == [1, 0]
    assert _factor("opsm", [0.5, 0.5001], max_kl=0.5) == [1, 1], "likelier than when it was sampled"


def test_veto_drops_the_sequence_of_a_token_beyond_either_end_alone() -> None:
    low, high = np.exp(-2.0), np.exp(3.0)
    drift, lengths = [0.0, -1.99, 0.0, -2.01, 2.99, 0.0, 3.01], [2, 2, 2, 1]
    assert _factor("veto", drift, lengths, min_ratio=low, max_ratio=high) == [1, 1, 0, 0, 1, 1, 0]
    assert _factor("veto", drift, lengths, min_ratio=low) == [1, 1, 0, 0, 1, 1, 1]


def test_token_without_an_advantage_is_no_stale_negative() -> None:
    drift_N = torch.tensor([-9.0, -9.0, -9.0], dtype=torch.float64)
    ids_N = torch.arange(3)
    zero_N = torch.zeros(3, dtype=torch.float64)
    tokens = TokenInputs(
        zero_N, torch.tensor([-1.0, 0.0, 1.0]), zero_N, zero_N, sequences=Sequences(ids_N, 3), current_N=drift_N
    )
    opsm = CORRECTIONS["opsm"]
    assert opsm.factor(tokens, opsm.options(max_kl=0.1)).tolist() == [False, True, True]


def test_kpop_compares_both_directions_and_takes_its_bound() -> None:
    x = {"b": np.log([0.9, 0.99, 0.5, 0.5]), "p": np.log([0.99, 0.9, 0.5, 0.6])}
    kl = np.maximum(_binary_kl(np.exp(x["p"]), np.exp(x["b"])), _binary_kl(np.exp(x["b"]), np.exp(x["p"])))
    b_N, p_N = torch.from_numpy(x["b"]), torch.from_numpy(x["p"])
    kpop, zero_N = CORRECTIONS["kpop"], torch.zeros(4)
    tokens = TokenInputs(b_N, zero_N, zero_N, zero_N, drift_N=p_N - b_N)
    for bound in sorted({*kl[kl > 0]}):
        for share in (1 + 1e-9, 1 - 1e-9):
            kept = kpop.factor(tokens, kpop.options(max_kl=bound * share)).tolist()
            assert kept == (kl <= bound * share).tolist()


def test_m2po_keeps_the_largest_number_of_tokens_below_its_bound_and_none_at_it() -> None:
    def kept(drift: list[float], bound: float) -> float:
        zero_N = torch.zeros(len(drift))
        part = TokenInputs(zero_N, zero_N, zero_N, zero_N, drift_N=torch.tensor(drift, dtype=torch.float64))
        m2po = CORRECTIONS["m2po"]
        assert m2po.statistics is not None
        return m2po.statistics([part], list, m2po.options(max_second_moment=bound))["largest"]

    assert kept([1.0, 2.0, 3.0], 14 / 3 + 1e-6) >= 9.0
    assert 4.0 <= kept([1.0, 2.0, 3.0], 14 / 3) < 9.0, "the mean of all three is the bound, not below it"
    assert 1.0 <= kept([1.0, 2.0, 3.0], 2.5) < 4.0
    assert kept([1.0, 2.0, 3.0], 1.0) < 1.0
    assert kept([2.0, 2.0, 0.1], 2.0) < 4.0, "equal values are dropped together"
