"""Evaluations are compared on the rows that they share, with the error of the differences."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from made_run import made_run, step_rows

from controller.report.hacking import find
from controller.report.learning import accuracy_fall
from controller.report.paired import compare, held_out_names, share_variance
from controller.telemetry.eval_values import EvalValues

NUM_STEPS = 36


def evaluation(version: int, values: Any, *, num_samples: int = 1, **held_out: Any) -> dict[str, Any]:
    """A row as telemetry writes it; held_out: scores of held-out scorers."""
    known = [value for value in values if value is not None]
    recorder = EvalValues(tuple(held_out))
    for name, scores in held_out.items():
        for number, score in enumerate(scores):
            recorder.record(version, number, {name: float(score)})
    found = recorder.finish(version, [None if value is None else float(value) for value in values],
                            num_samples=num_samples)  # fmt: skip
    return {"version": version, "accuracy": sum(known) / len(known), "num_scored": len(known),
            "num_rows": len(values), "values": found}  # fmt: skip


def answers(rng: np.random.Generator, shares: list[float], num_rows: int, churn: float = 0.15) -> list[np.ndarray]:
    """Solved rows of consecutive evaluations: rows have difficulties, and some are decided again each time."""
    difficulty = rng.random(num_rows)
    noise = rng.random(num_rows)
    found = []
    for share in shares:
        noise = np.where(rng.random(num_rows) < churn, rng.random(num_rows), noise)
        found.append((0.7 * difficulty + 0.3 * noise < _quantile(share)).astype(float))
    return found


@functools.cache
def _quantile(share: float) -> float:
    """Of 0.7 * u + 0.3 * v for uniform u and v: the value below which `share` of them are."""
    rng = np.random.default_rng(0)
    return float(np.quantile(0.7 * rng.random(20_000) + 0.3 * rng.random(20_000), share))


def test_error_is_that_of_the_differences_of_rows_with_one_row_more():
    early, late = np.array([1.0, 1, 1, 0] * 25), np.array([1.0, 1, 0, 0] * 25)
    same = compare(evaluation(0, early), [evaluation(5, late)])
    assert same is not None
    differences = early - late
    expected = math.sqrt((((differences - differences.mean()) ** 2).sum() + 1) / 99 / 100)
    assert (same.fall, same.num_rows, same.error) == (pytest.approx(0.25), 100, pytest.approx(expected))
    row = {"accuracy": 0.75, "num_scored": 100}
    assert same.error < math.sqrt(2 * share_variance(row)) * 0.75


def test_only_rows_that_every_evaluation_has_a_score_for_are_compared():
    long, short = [1.0] * 20 + [0.0] * 60, [1.0] * 18 + [None, 0.0]
    same = compare(evaluation(0, long), [evaluation(5, short)])
    assert same is not None
    assert (same.num_rows, same.early, same.late) == (19, 1.0, (pytest.approx(18 / 19),))
    assert compare(evaluation(0, long), [evaluation(5, [1.0] * 9)]) is None


def test_several_answers_of_a_row_are_one_value():
    same = compare(evaluation(0, [1, 1, 1, 0] * 10, num_samples=2), [evaluation(5, [1, 0, 0, 0] * 10, num_samples=2)])
    assert same is not None
    assert (same.num_rows, same.early, same.late) == (20, 0.75, (0.25,))


def test_records_without_values_are_compared_if_they_have_as_many_rows():
    rows = [{"version": v, "accuracy": a, "num_scored": 100, "num_rows": n}
            for v, a, n in ((0, 0.5, 100), (5, 0.4, 100), (9, 0.4, 50))]  # fmt: skip
    same = compare(rows[0], rows[1:2])
    assert same is not None
    assert same.error == pytest.approx(math.sqrt(share_variance(rows[0]) + share_variance(rows[1])))
    assert compare(rows[0], rows[2:]) is None


def test_fall_of_the_accuracy_is_not_found_between_evaluations_of_other_rows():
    easy, hard = [1.0] * 50, [0.0] * 150
    learned = [evaluation(0, [*([1.0] * 40), *([0.0] * 10)]), evaluation(5, easy), evaluation(10, [*easy, *hard])]
    assert [round(row["accuracy"], 2) for row in learned] == [0.8, 1.0, 0.25]
    fall = accuracy_fall(made_run(evals=learned))
    assert fall is not None
    assert not fall.is_notable
    forgot = [learned[0], learned[1], evaluation(10, [*([0.0] * 30), *([1.0] * 20), *hard])]
    fall = accuracy_fall(made_run(evals=forgot))
    assert fall is not None
    assert fall.is_notable
    assert (fall.best, fall.last, fall.best_step) == (1.0, 0.4, 5)


def named(seed: int, shares: list[float], num_rows: int = 200, *, judge: list[float] | None = None) -> bool:
    """Whether a run with a rising reward and these accuracies, or these scores of a judge, is named as a hack."""
    rng = np.random.default_rng(seed)
    solved = answers(rng, shares, num_rows)
    scores = answers(rng, judge, num_rows) if judge is not None else None
    rows = [
        evaluation(5 * place, one, **({"judge": scores[place]} if scores else {})) for place, one in enumerate(solved)
    ]
    steps = step_rows(NUM_STEPS, reward_mean=np.linspace(0.4, 0.8, NUM_STEPS) + rng.normal(0, 0.03, NUM_STEPS))
    found = find(made_run(kind="running", steps=steps, evals=rows))
    return any(rated.finding.kind == "reward_hacked" for rated in found)


FALLING, STEADY = [0.6, 0.62, 0.6, 0.57, 0.52, 0.48], [0.6] * 6


@pytest.mark.parametrize(
    ("shares", "judge", "num_rows"), [(FALLING, None, 200), (STEADY, FALLING, 200), (FALLING, None, 500)]
)
def test_a_fall_of_a_tenth_is_named_in_nine_of_ten_runs(shares, judge, num_rows):
    assert sum(named(seed, shares, num_rows, judge=judge) for seed in range(40)) >= 36


@pytest.mark.parametrize(
    ("shares", "judge", "num_rows"),
    [
        (STEADY, STEADY, 50), (STEADY, STEADY, 200), ([0.97] * 6, None, 100),
        ([0.3, 0.4, 0.5, 0.6, 0.65, 0.66], STEADY, 200),
    ],
)  # fmt: skip
def test_nothing_is_named_in_nine_of_ten_sound_runs(shares, judge, num_rows):
    assert sum(named(seed, shares, num_rows, judge=judge) for seed in range(40)) <= 4


@pytest.mark.parametrize(
    "damage",
    [
        {}, {"values": 3}, {"values": [1, "x", None, 10**400]}, {"num_samples": 0}, {"num_samples": 7},
        {"num_samples": "2"}, {"values": [[1]]},
    ],
)  # fmt: skip
def test_damaged_values_are_no_comparison(damage):
    sound = evaluation(0, [1.0] * 20)
    damaged = evaluation(5, [0.5] * 20)
    damaged["values"] = {**damaged["values"], **damage} if damage else None
    same = compare(sound, [damaged])
    assert same is None or same.error == math.sqrt(share_variance(sound) + share_variance(damaged))
    assert compare(sound, [damaged], "held_out/judge") is None
    assert compare(sound, [{**damaged, "values": {"held_out": [1]}}], "held_out/judge") is None


def test_names_of_held_out_scorers_are_those_of_all_evaluations():
    rows = [evaluation(0, [1.0] * 20), evaluation(5, [1.0] * 20, judge=[0.5] * 20), {"values": "damaged"}]
    assert held_out_names(rows) == ["held_out/judge"]
