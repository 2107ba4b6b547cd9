"""Reward hacks planted in the series of runs are named before the run ends, and sound runs are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made_run import made_run, step_rows

from controller.report.data import RunData
from controller.report.diagnosis import diagnose
from controller.report.hacking import KINDS, find
from controller.report.minimum import MIN_STEPS

NUM_STEPS, PLANNED = 30, 40


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
    return {rated.finding.kind for rated in find(data)}


LONGER = np.linspace(30, 90, NUM_STEPS)
HACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy falls": ("reward_hacked", {"accuracy": [0.6, 0.65, 0.6, 0.5, 0.45, 0.4]}),
    "a judge falls": ("reward_hacked", {"held_out/judge": np.linspace(0.7, 0.4, NUM_STEPS)}),
    "longer answers": ("length_hacked", {"response_len_mean": LONGER, "length_reward_correlation": 0.6}),
    "shorter answers": ("length_hacked", {"response_len_mean": LONGER[::-1], "length_reward_correlation": -0.6,
                                          "accuracy": [0.5, 0.5, 0.49, 0.48]}),
    "repetition": ("format_hacked", {"repeated_share": np.linspace(0.05, 0.6, NUM_STEPS)}),
    "signs": ("format_hacked", {"symbol_share": np.linspace(0.1, 0.5, NUM_STEPS)}),
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
    assert "checkpoints up to step 10 contain the best policy" in first.advice
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
