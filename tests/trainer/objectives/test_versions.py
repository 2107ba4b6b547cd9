"""Parts of a token's ratio: arithmetic, corrections of one part, the balance heuristic, metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import CorrectionSettings, LossSettings, WeightClip
from trainer.objectives.loss import policy_loss
from trainer.objectives.loss_sums import LossSums
from trainer.objectives.port import Recalled, Sequences, TokenInputs
from trainer.objectives.registry import CORRECTIONS, corrects_for_sampling, loss_faults, loss_of
from trainer.objectives.step_statistics import step_statistics
from trainer.objectives.trial import try_loss
from trainer.objectives.versions import of_part, with_version_logprobs

LENGTHS = (3, 7, 1, 5, 4)
NUM = sum(LENGTHS)
OFF = WeightClip(mode="off")
Numbers = dict[str, np.ndarray]
SHARES = {1: 0.25, 2: 0.35}
"""Of the step's tokens, by recalled version; the policy at the start of the step stands for the others."""


def numbers(seed: int = 0) -> Numbers:
    rng = np.random.default_rng(seed)
    b = -rng.exponential(1.0, NUM) - 0.05
    x = {
        "b": b,
        "o": b + rng.normal(0, 0.2, NUM),
        "p": b + rng.normal(0, 0.4, NUM),
        "c": b + rng.normal(0, 0.4, NUM),
        "A": np.repeat([1.3, -0.7, -0.4, -1.1, 0.9], LENGTHS),
        "o1": b + rng.normal(0, 0.5, NUM),
        "o2": b + rng.normal(0, 0.5, NUM),
    }
    kind = rng.integers(0, 3, NUM)  # 0: recalled; 1: the present version; 2: not held
    return {**x, "recalled": kind == 0, "missing": kind == 2}


def version_logprobs(x: Numbers) -> np.ndarray:
    """o of every token: that of the start of the step where nothing was recalled."""
    return np.where(x["recalled"], x["o"], x["p"])


def mixture(x: Numbers) -> np.ndarray:
    rest = 1 - sum(SHARES.values())
    return np.asarray(SHARES[1] * np.exp(x["o1"]) + SHARES[2] * np.exp(x["o2"]) + rest * np.exp(x["p"]))


def inputs(x: Numbers, members: slice = slice(None)) -> TokenInputs:
    t = {name: torch.from_numpy(value[members].copy()) for name, value in x.items()}
    mixture_N = torch.logaddexp(t["o1"] + np.log(SHARES[1]), t["o2"] + np.log(SHARES[2]))
    recalled = Recalled(
        t["o"].where(t["recalled"], torch.nan), t["recalled"], t["missing"], mixture_N, 1 - sum(SHARES.values())
    )
    ids_N = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))[members]
    _, ids_N = ids_N.unique(return_inverse=True)
    num = len(ids_N)
    return TokenInputs(
        t["b"], t["A"], torch.zeros(num), torch.full((num,), 1 / NUM, dtype=torch.float64), t["p"],
        sequences=Sequences(ids_N, int(ids_N.max()) + 1), recalled=recalled,
    )  # fmt: skip


def correction(kind: str, part: Any = "both", **options: Any) -> CorrectionSettings:
    return CorrectionSettings(kind=kind, part=part, options=options)


def loss_and_gradient(
    x: Numbers, settings: LossSettings, members: slice = slice(None)
) -> tuple[float, np.ndarray, LossSums]:
    current_N = torch.from_numpy(x["c"][members].copy()).requires_grad_()
    tokens = inputs(x, members)
    tokens = replace(tokens, step=step_statistics(loss_of(settings), [inputs(x)], list))
    loss, sums = policy_loss(current_N, torch.zeros(len(current_N)), tokens, settings)
    (gradient_N,) = torch.autograd.grad(loss, current_N)
    return loss.item(), gradient_N.numpy(), sums


def oracle(x: Numbers, eps: float, largest: float) -> float:
    """arXiv 2605.12070, section 3.1: truncate what engine and trainer differ in, clip what training changed."""
    o = version_logprobs(x)
    mismatch, staleness = np.minimum(np.exp(o - x["b"]), largest), np.exp(x["c"] - o)
    surrogate = np.minimum(staleness * x["A"], np.clip(staleness, 1 - eps, 1 + eps) * x["A"])
    return float(-(mismatch * surrogate).mean())


@pytest.mark.parametrize("seed", range(4))
def test_proximal_version_truncates_the_mismatch_and_clips_the_staleness(seed: int) -> None:
    x = numbers(seed)
    settings = LossSettings(proximal="version", weight=WeightClip(mode="truncate", max=1.1))
    loss, gradient_N, _ = loss_and_gradient(x, settings)
    assert loss == pytest.approx(oracle(x, 0.2, 1.1), rel=1e-6)
    for token in range(NUM):
        rise = []
        for step in (1e-6, -1e-6):
            moved = x["c"].copy()
            moved[token] += step
            rise.append(oracle({**x, "c": moved}, 0.2, 1.1))
        assert gradient_N[token] == pytest.approx((rise[0] - rise[1]) / 2e-6, rel=1e-6, abs=1e-9)


def test_a_micro_batch_at_a_time_gives_the_same_loss_and_metrics() -> None:
    x, cuts = numbers(), (slice(0, 3), slice(3, 11), slice(11, NUM))
    settings = LossSettings(
        weight=OFF, corrections=(correction("token_weight", "mismatch"), correction("balance_heuristic"))
    )
    whole, gradient_N, sums = loss_and_gradient(x, settings)
    parts = [loss_and_gradient(x, settings, members) for members in cuts]
    assert sum(part[0] for part in parts) == pytest.approx(whole, rel=1e-9)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient_N, rtol=1e-9)
    added = parts[0][2].plus(parts[1][2]).plus(parts[2][2]).metrics(1)
    assert added == pytest.approx(sums.metrics(1), rel=1e-9)


def test_metrics_of_both_parts_are_means_over_tokens_whose_version_is_held() -> None:
    x = numbers(2)
    _, _, sums = loss_and_gradient(x, LossSettings())
    metrics, held = sums.metrics(1), ~x["missing"]
    mismatch = (version_logprobs(x) - x["b"])[held]
    staleness = (x["p"] - version_logprobs(x))[held]
    assert metrics["version_missing_share"] == pytest.approx(x["missing"].mean())
    assert metrics["kl_mismatch"] == pytest.approx((np.exp(mismatch) - mismatch - 1).mean(), rel=1e-6)
    assert metrics["kl_staleness"] == pytest.approx((np.exp(staleness) - staleness - 1).mean(), rel=1e-6)
    assert metrics["mismatch_nats_mean"] == pytest.approx(np.abs(mismatch).mean(), rel=1e-6)
    assert metrics["staleness_nats_mean"] == pytest.approx(np.abs(staleness).mean(), rel=1e-6)
    assert metrics["mismatch_nats_max"] == pytest.approx(np.abs(mismatch).max(), rel=1e-6)


def test_where_no_version_is_held_only_that_is_said_and_the_loss_is_as_without() -> None:
    x = numbers()
    x["recalled"][:], x["missing"][:] = False, True
    settings = LossSettings(weight=WeightClip(max=1.2))
    loss, _, sums = loss_and_gradient(x, settings)
    plain = replace(inputs(x), recalled=None)
    expected, plain_sums = policy_loss(torch.from_numpy(x["c"]), torch.zeros(NUM), plain, settings)
    assert loss == expected.item()
    extra = set(sums.metrics(1)) - set(plain_sums.metrics(1))
    assert extra == {"version_missing_share"}
    assert sums.metrics(1)["version_missing_share"] == 1.0
    as_recomputed, _, _ = loss_and_gradient(x, LossSettings(proximal="version", weight=WeightClip(max=1.2)))
    assert as_recomputed == pytest.approx(expected.item(), rel=1e-12)


def test_without_log_probs_of_the_start_the_current_ones_take_their_place() -> None:
    x = numbers()
    current_N = torch.from_numpy(x["c"].copy()).requires_grad_()
    tokens = replace(inputs(x), proximal_N=None)
    loss, _ = policy_loss(current_N, torch.zeros(NUM), tokens, LossSettings(proximal="version"))
    assert loss.item() == pytest.approx(oracle({**x, "p": x["c"]}, 0.2, 5.0), rel=1e-6)


# ---------------------------------------------------------------- corrections of a part


def weights_of(x: Numbers, settings: LossSettings) -> np.ndarray:
    """Weight of each token, read off the gradient of a loss that is -w u A / N."""
    _, gradient_N, _ = loss_and_gradient(x, settings)
    return np.asarray(gradient_N / (-np.exp(x["c"] - x["p"]) * x["A"] / NUM))


def wide(*corrections: CorrectionSettings, **changes: Any) -> LossSettings:
    return LossSettings(**{"eps_low": 0.99, "eps_high": 100.0, "corrections": corrections, "weight": OFF, **changes})


@pytest.mark.parametrize("seed", range(4))
def test_balance_heuristic_equals_its_formula(seed: int) -> None:
    x = numbers(seed)
    expected = np.minimum(np.exp(x["p"]) / mixture(x), 1.2)
    assert len(np.unique(expected)) > 2
    np.testing.assert_allclose(weights_of(x, wide(correction("balance_heuristic", max=1.2))), expected, rtol=1e-6)


def test_balance_heuristic_is_bounded_by_the_share_of_a_near_version() -> None:
    x = numbers()
    x["o1"] = x["p"].copy()
    found = weights_of(x, wide(correction("balance_heuristic", max=100.0)))
    assert (found <= 1 / SHARES[1]).all()


def test_truncated_weights_of_both_parts_multiply_to_the_whole_ratio_where_neither_is_truncated() -> None:
    x = numbers(1)
    o = version_logprobs(x)
    pair = (correction("token_weight", "mismatch", max=1.1), correction("token_weight", "staleness", max=1.2))
    expected = np.minimum(np.exp(o - x["b"]), 1.1) * np.minimum(np.exp(x["p"] - o), 1.2)
    np.testing.assert_allclose(weights_of(x, wide(*pair)), expected, rtol=1e-6)
    untruncated = tuple(correction("token_weight", part, max=1e6) for part in ("mismatch", "staleness"))
    np.testing.assert_allclose(weights_of(x, wide(*untruncated)), np.exp(x["p"] - x["b"]), rtol=1e-6)


PARTS: list[tuple[str, dict[str, Any]]] = [
    ("icepop", {"low": 0.8, "high": 1.25}),
    ("kpop", {"max_kl": 0.01}),
    ("veto", {"min_ratio": 0.7}),
    ("geometric_mask", {"low": 0.9, "high": 1.1}),
    ("sequence_rejection", {"low": 0.7, "high": 1.4}),
    ("kl_rejection", {"max_kl": 0.03}),
    ("opsm", {"max_kl": 0.02}),
    ("m2po", {"max_second_moment": 0.02}),
    ("sequence_weight", {"max": 1.1}),
    ("token_weight", {"max": 1.1}),
]


def test_every_correction_of_a_ratio_is_tried_on_its_parts() -> None:
    of_ratio = {name for name, one in CORRECTIONS.items() if one.is_of_ratio and one.part == "both"}
    assert {kind for kind, _ in PARTS} == of_ratio


@pytest.mark.parametrize("part", ["mismatch", "staleness"])
@pytest.mark.parametrize(("kind", "options"), PARTS)
def test_a_correction_of_a_part_is_that_correction_between_two_other_policies(
    kind: str, options: dict[str, Any], part: str
) -> None:
    x = numbers(3)
    o = version_logprobs(x)
    between = {**x, "p": o, "c": o} if part == "mismatch" else {**x, "b": o}
    between = {**between, "recalled": np.zeros(NUM, bool)}
    tokens, other = inputs(x), inputs(between)
    settings = wide(correction(kind, part, **options))
    ((one, parsed),) = loss_of(settings).corrections
    assert one.name == f"{kind}_{part}"
    current_N = torch.from_numpy(x["c"])
    step = step_statistics(loss_of(settings), [tokens], list)
    tokens = with_version_logprobs(replace(tokens, step=step, current_N=current_N), torch.from_numpy(x["p"]))
    found_N = one.factor(replace(tokens, drift_N=torch.from_numpy(x["p"] - x["b"])), parsed)
    plain = wide(correction(kind, **options))
    ((whole, _),) = loss_of(plain).corrections
    other = replace(other, recalled=None, current_N=torch.from_numpy(between["c"]))
    other = replace(other, step=step_statistics(loss_of(plain), [other], list))
    expected_N = whole.factor(replace(other, drift_N=torch.from_numpy(between["p"] - between["b"])), parsed)
    np.testing.assert_allclose(found_N.numpy(), expected_N.numpy(), rtol=1e-9)


def test_the_same_correction_may_look_at_both_parts_and_reports_each() -> None:
    pair = tuple(correction("m2po", part, max_second_moment=0.02) for part in ("mismatch", "staleness"))
    settings = LossSettings(corrections=pair)
    assert list(loss_faults(settings, has_versions=True)) == []
    _, _, sums = loss_and_gradient(numbers(), settings)
    metrics = sums.metrics(1)
    assert metrics["m2po_mismatch_masked_share"] != metrics["m2po_staleness_masked_share"]


def test_a_correction_of_the_whole_is_itself() -> None:
    assert of_part(CORRECTIONS["icepop"], "both") is CORRECTIONS["icepop"]


# ---------------------------------------------------------------- what does not fit together


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (wide(correction("no_eos_mask", "mismatch"), weight=WeightClip()), "corrections.0.part", "has no `part`"),
        (
            wide(correction("staleness_mask", "staleness", max=1), weight=WeightClip()),
            "corrections.0.part",
            "no `part`",
        ),
        (wide(correction("balance_heuristic", "mismatch")), "corrections.0.part", "has no `part`"),
        (wide(correction("balance_heuristic"), weight=WeightClip()), "weight.mode", "both weight by exp(p - b)"),
        (
            wide(correction("balance_heuristic"), correction("token_weight", "staleness")),
            "weight.mode",
            "both weight by the staleness",
        ),
        (wide(correction("token_weight", "mismatch"), weight=WeightClip()), "weight.mode", "both weight by exp(p - b)"),
        (
            wide(correction("token_weight", "mismatch"), weight=WeightClip(), proximal="version"),
            "weight.mode",
            "both weight by the mismatch",
        ),
        (wide(correction("balance_heuristic"), proximal="version"), "proximal", "already part of the ratio"),
        (wide(correction("token_weight"), proximal="version"), "proximal", "already part of the ratio"),
        (wide(correction("token_weight", "mismatch"), proximal="behaviour"), "proximal", "already part of the ratio"),
        (wide(proximal="version"), "weight.mode", "the loss is not decoupled"),
    ],
)
def test_what_does_not_fit_together_is_named(settings: LossSettings, key: str, words: str) -> None:
    (fault,) = loss_faults(settings, has_versions=True)
    assert fault.key == f"trainer.loss.{key}"
    assert words in fault.what


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (LossSettings(proximal="version"), "proximal"),
        (wide(correction("icepop", "mismatch"), weight=WeightClip()), "corrections.0.part"),
        (wide(correction("balance_heuristic")), "corrections.0.kind"),
    ],
)
def test_without_kept_versions_what_needs_them_is_refused(settings: LossSettings, key: str) -> None:
    (fault,) = loss_faults(settings)
    assert (fault.key, fault.remedy) == (f"trainer.loss.{key}", "trainer.version_logprobs: {}")
    assert list(loss_faults(settings, has_versions=True)) == []


def test_only_a_weight_of_the_mismatch_corrects_for_the_engine() -> None:
    assert corrects_for_sampling(LossSettings(proximal="version"))
    assert corrects_for_sampling(wide(correction("token_weight", "mismatch")))
    assert not corrects_for_sampling(wide(correction("balance_heuristic")))
    assert not corrects_for_sampling(wide(correction("token_weight", "staleness")))


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(proximal="version"),
        wide(correction("balance_heuristic"), correction("token_weight", "mismatch")),
        wide(correction("m2po", "staleness"), weight=WeightClip()),
    ],
)
def test_the_call_before_a_run_knows_versions(settings: LossSettings) -> None:
    try_loss(settings)
