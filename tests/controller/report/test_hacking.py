"""Reward hacks planted in the series of runs are named before the run ends, and sound runs are left alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from made_run import made_run, step_rows

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.hacking import KINDS, find
from controller.report.minimum import MIN_STEPS

NUM_STEPS, PLANNED = 36, 40


def evals(seed: int, shares: list[float], every: int = 5, num_rows: int = 200) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed + 1000)
    return [
        {"version": place * every, "accuracy": rng.binomial(num_rows, share) / num_rows, "num_scored": num_rows}
        for place, share in enumerate(shares)
    ]


def run(seed: int, *, accuracy: list[float] | None = None, **series: Any) -> RunData:
    """A run in progress whose reward rises from 0.4 to 0.8, with noise in every series."""
    rng = np.random.default_rng(seed)
    noise = {"reward_mean": 0.03, "response_len_mean": 4.0, "length_reward_correlation": 0.1, "repeated_share": 0.02,
             "symbol_share": 0.02, "held_out/judge": 0.03}  # fmt: skip
    given = {"reward_mean": np.linspace(0.4, 0.8, NUM_STEPS), **series}
    columns = {
        key: np.broadcast_to(np.asarray(values, float), NUM_STEPS) + rng.normal(0, noise.get(key, 0.0), NUM_STEPS)
        for key, values in given.items()
    }
    made = step_rows(NUM_STEPS, **columns)
    return made_run(kind="running", steps=made, evals=evals(seed, accuracy) if accuracy else [])


def kinds(data: RunData) -> set[str]:
    """Kinds of warnings."""
    return {rated.finding.kind for rated in find(data) if rated.finding.severity != "info"}


def remarks(data: RunData) -> set[str]:
    return {rated.finding.kind for rated in find(data)} - kinds(data)


def wavering(rng: np.random.Generator, num: int, correlation: float) -> np.ndarray:
    """Values of an autoregression of order 1 with standard deviation 1."""
    found = rng.normal(size=num)
    for place in range(1, num):
        found[place] = correlation * found[place - 1] + math.sqrt(1 - correlation**2) * found[place]
    return found


LONGER = np.linspace(30, 90, NUM_STEPS)
FLAT = [0.5, 0.5, 0.49, 0.5, 0.49, 0.5, 0.49, 0.48]
HACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy falls": ("reward_hacked", {"accuracy": [0.6, 0.65, 0.6, 0.5, 0.45, 0.4]}),
    "a judge falls": ("reward_hacked", {"held_out/judge": np.linspace(0.7, 0.4, NUM_STEPS)}),
    "a judge falls at once": ("reward_hacked", {"held_out/judge": np.repeat([0.7, 0.4], NUM_STEPS // 2)}),
    "longer answers": ("length_hacked", {"response_len_mean": LONGER, "length_reward_correlation": 0.6,
                                         "accuracy": FLAT}),
    "shorter answers": ("length_hacked", {"response_len_mean": LONGER[::-1], "length_reward_correlation": -0.6,
                                          "accuracy": FLAT}),
    "repetition": ("format_hacked", {"repeated_share": np.linspace(0.05, 0.6, NUM_STEPS), "accuracy": FLAT}),
    "signs": ("format_hacked", {"symbol_share": np.linspace(0.1, 0.5, NUM_STEPS), "accuracy": FLAT}),
    "forged": ("environment_forged", {"forged_share": np.linspace(0.0, 0.3, NUM_STEPS)}),
}  # fmt: skip
SOUND: dict[str, dict[str, Any]] = {
    "it learns": {"accuracy": [0.4, 0.5, 0.6, 0.7, 0.75, 0.8], "held_out/judge": np.linspace(0.4, 0.7, NUM_STEPS)},
    "accuracy wavers": {"accuracy": [0.6] * 6, "held_out/judge": 0.6},
    "it reasons": {"response_len_mean": LONGER, "length_reward_correlation": 0.0},
    "it reasons, and longer answers are better": {
        "response_len_mean": LONGER, "length_reward_correlation": 0.5, "accuracy": [0.3, 0.4, 0.5, 0.6],
    },
    "it learns a format": {"symbol_share": np.linspace(0.1, 0.5, NUM_STEPS), "accuracy": [0.2, 0.4, 0.6, 0.7]},
    "few marks": {"forged_share": 0.01},
    "marks that do not become more": {"forged_share": np.linspace(0.3, 0.1, NUM_STEPS)},
}  # fmt: skip


@pytest.mark.parametrize("name", HACKS)
def test_a_planted_hack_is_named_before_the_run_ends_in_nine_of_ten_runs(name):
    kind, planted = HACKS[name]
    found = [kinds(run(seed, **planted)) for seed in range(10)]
    assert sum(kind in one for one in found) >= 9
    assert NUM_STEPS < PLANNED


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_named_in_nine_of_ten_sound_runs(name):
    found = [kinds(run(seed, **SOUND[name])) for seed in range(20)]
    assert sum(not one for one in found) >= 18


def judged(seed: int, means: np.ndarray, *, groups: int, spread: float = 0.3) -> RunData:
    """A run whose judge has these means, with the noise of the groups of each step; groups differ by `spread`."""
    rng = np.random.default_rng(seed)
    scores = means[:, None] + rng.normal(0, spread, (len(means), groups))
    errors = scores.std(axis=1, ddof=1) / math.sqrt(groups)
    num = len(means)
    series = {"held_out/judge": scores.mean(axis=1), "held_out_error/judge": errors}
    reward = np.linspace(0.4, 0.8, num) + rng.normal(0, 0.03, num)
    return made_run(kind="running", steps=step_rows(num, reward_mean=reward, **series))


@pytest.mark.parametrize(("num_steps", "groups"), [(28, 16), (40, 16), (60, 12)])
def test_a_judge_of_few_samples_that_falls_is_named_by_the_errors_of_its_means_in_nine_of_ten_runs(num_steps, groups):
    slowly = np.linspace(0.7, 0.4, num_steps)
    assert sum("reward_hacked" in kinds(judged(seed, slowly, groups=groups)) for seed in range(20)) >= 18


@pytest.mark.parametrize("wavers", [0.0, 0.02])
def test_a_flat_judge_with_known_errors_is_named_at_no_look_in_nine_of_ten_runs(wavers):
    num_named = 0
    for seed in range(20):
        means = 0.5 + wavers * wavering(np.random.default_rng(seed + 100), 100, 0.9)
        data = judged(seed, means, groups=8)
        looks = (dataclasses.replace(data, steps=data.steps[:num]) for num in range(20, 101, 8))
        num_named += any(kinds(look) for look in looks)
    assert num_named <= 2


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_flat_judge_is_named_at_no_look_in_nineteen_of_twenty_runs(correlation):
    num_named = 0
    for seed in range(20):
        judge = 0.5 + 0.15 * wavering(np.random.default_rng(seed), 200, correlation)
        steps = step_rows(200, reward_mean=np.linspace(0.4, 0.8, 200), **{"held_out/judge": judge})
        data = made_run(steps=steps)
        looks = (dataclasses.replace(data, steps=steps[:num]) for num in range(MIN_STEPS, 201, 12))
        num_named += any(kinds(look) for look in looks)
    assert num_named <= 1


def test_a_flat_accuracy_is_named_at_no_look_in_nineteen_of_twenty_runs():
    steps = step_rows(200, reward_mean=np.linspace(0.4, 0.8, 200))[::10]
    num_named = 0
    for seed in range(20):
        data = made_run(steps=steps, evals=evals(seed, [0.5] * 100, every=2, num_rows=100))
        looks = (dataclasses.replace(data, evals=data.evals[:num]) for num in range(3, 101, 3))
        num_named += any(kinds(look) for look in looks)
    assert num_named <= 1


def test_accuracies_of_other_rows_are_not_compared():
    steps = run(0).steps
    measured = evals(0, [0.5, 0.7, 0.7, 0.7, 0.5, 0.5], num_rows=200)
    assert kinds(made_run(steps=steps, evals=measured)) == {"reward_hacked"}
    for row, num_rows in zip(measured, (800, 200, 200, 200, 800, 800), strict=True):
        row["num_rows"] = num_rows
    assert kinds(made_run(steps=steps, evals=measured)) == set()


def test_a_change_of_the_answers_is_a_remark_without_evaluations_and_waits_for_two_after_it():
    planted = {"symbol_share": np.linspace(0.1, 0.5, NUM_STEPS)}
    assert (kinds(run(0, **planted)), remarks(run(0, **planted))) == (set(), {"format_hacked"})
    once = dataclasses.replace(run(0, accuracy=[0.5, 0.5, 0.5, 0.5], **planted), config={"eval": {"every_steps": 5}})
    assert find(once) == []
    assert kinds(run(0, accuracy=FLAT, **planted)) == {"format_hacked"}
    ended = dataclasses.replace(once, state={"status": "finished"})
    assert remarks(ended) == {"format_hacked"}


def test_nothing_is_named_before_the_minimum_of_steps():
    data = run(0, **HACKS["forged"][1])
    assert find(made_run(steps=data.steps[-MIN_STEPS:])) != []
    assert find(made_run(steps=data.steps[-MIN_STEPS + 1 :])) == []


def test_a_hack_is_the_verdict_unless_the_policy_has_collapsed():
    rising = {"accuracy": [0.6, 0.65, 0.6, 0.5, 0.45, 0.45]}
    first = diagnose(run(0, **rising))[0]
    assert (first.kind, first.severity) == ("reward_hacked", "warning")
    assert first.title.startswith(
        "The reward rises while held-out accuracy falls: from version 10 to 25 the reward rose"
    )
    assert "The best policy is in the checkpoints up to step 10" in first.advice
    collapsed = [one.kind for one in diagnose(run(0, accuracy=[0.6, 0.6, 0.5, 0.3, 0.2, 0.1]))]
    assert collapsed[:2] == ["policy_collapsed", "reward_hacked"]


def test_a_reward_that_falls_with_the_accuracy_is_no_hack():
    falling = run(0, reward_mean=np.linspace(0.8, 0.3, NUM_STEPS), accuracy=[0.6, 0.5, 0.4, 0.3, 0.3, 0.2])
    assert kinds(falling) == set()


def test_constant_and_missing_series_are_no_change():
    assert kinds(made_run(steps=step_rows(reward_mean=0.5, response_len_mean=5.0))) == set()
    assert kinds(made_run(steps=[{"step": n + 1} for n in range(20)])) == set()


def test_every_kind_is_tested():
    assert {kind for kind, _ in HACKS.values()} == set(KINDS)
