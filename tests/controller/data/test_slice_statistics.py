"""Formulas against exact sums, and how often a comparison of slices is right or wrong on simulated verdicts."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from controller.data.slice_statistics import (
    MIN_DIFFERENCE,
    Share,
    compare,
    design_effect,
    fisher,
    holm,
    newcombe,
    wilson,
)


@pytest.mark.parametrize(
    ("solved", "answers", "other_solved", "others"), [(1, 10, 8, 10), (0, 12, 0, 9), (7, 30, 31, 40), (12, 12, 3, 11)]
)
def test_fisher_is_the_sum_over_all_tables_that_are_not_more_probable(solved, answers, other_solved, others):
    total = solved + other_solved
    ways = {
        k: comb(answers, k) * comb(others, total - k)
        for k in range(max(0, total - others), min(answers, total) + 1)
    }  # fmt: skip
    exact = sum(one for one in ways.values() if one <= ways[solved]) / sum(ways.values())
    assert fisher(Share(solved, answers), Share(other_solved, others)) == pytest.approx(exact, rel=1e-9)


def test_wilson_contains_the_share_and_stays_within_0_and_1():
    assert wilson(Share(0, 20))[0] == 0.0
    assert wilson(Share(20, 20)) == (pytest.approx(0.8389, abs=1e-4), 1.0)
    low, high = wilson(Share(81, 263))  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_interval_of_a_difference_is_that_of_newcombes_paper():
    low, high = newcombe(Share(56, 70), Share(48, 80))  # table II, method 10: 0.0524 to 0.3339
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


def test_holm_never_lowers_a_p_value_and_keeps_their_order():
    assert holm([]) == []
    assert holm([0.5, 0.001, 0.02]) == [0.5, 0.003, 0.04]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_equal_answers_to_a_row_count_once_and_independent_ones_all():
    rng = np.random.default_rng(0)
    row_N = np.repeat(np.arange(200), 4)
    per_row = rng.random(200) < 0.6
    assert design_effect(np.repeat(per_row, 4), row_N) == pytest.approx(4.0)
    assert design_effect(rng.random(800) < 0.6, row_N) == pytest.approx(1.0, abs=0.2)
    assert design_effect(per_row, np.arange(200)) == 1.0


def test_slice_and_its_complement_are_one_test():
    is_solved, half = np.arange(80) % 3 == 0, np.arange(80) < 20
    alone, _ = compare({"a": half}, is_solved, np.arange(80))
    both, _ = compare({"a": half, "b": ~half}, is_solved, np.arange(80))
    assert both["a"].p_corrected == alone["a"].p_corrected == alone["a"].p
    assert both["b"].difference == -both["a"].difference


def test_a_slice_that_is_too_small_has_no_p_value_and_is_never_weak():
    is_solved = np.arange(100) >= 9
    found, _ = compare({"few": np.arange(100) < 9}, is_solved, np.arange(100))
    assert found["few"].share.value == 0.0
    assert found["few"].p is None
    assert not found["few"].is_weak


def test_a_small_difference_is_not_weak_however_certain():
    n = 200_000
    is_solved = np.concatenate((np.arange(n) % 100 < 57, np.arange(n) % 100 < 60))
    found, _ = compare({"a": np.arange(2 * n) < n}, is_solved, np.arange(2 * n))
    assert found["a"].p_corrected is not None
    assert found["a"].p_corrected < 1e-6
    assert -MIN_DIFFERENCE < found["a"].difference < 0
    assert not found["a"].is_weak


# ------------------------------------------------------------ how often it is right


def simulated(seed: int, *, weak: float | None, num_rows: int = 400, num_samples: int = 1) -> set[str]:
    """Weak slices of a simulated evaluation with 22 slices, in which rows differ in difficulty.

    weak: by how much a tenth of the rows are solved less often; None: all are solved equally often.
    """
    rng = np.random.default_rng(seed)
    row_N = np.repeat(np.arange(num_rows), num_samples)
    columns = {"topic": rng.integers(0, 10, num_rows), "level": rng.integers(0, 5, num_rows),
               "length": rng.integers(0, 4, num_rows), "source": rng.integers(0, 3, num_rows)}  # fmt: skip
    solve = np.full(num_rows, 0.75) if num_samples == 1 else rng.beta(1.5, 0.5, num_rows)
    if weak is not None:
        solve = np.where(columns["topic"] == 3, np.maximum(0.0, solve - weak), solve)
    is_solved_N = rng.random(len(row_N)) < solve[row_N]
    members = {f"{name} {value}": values[row_N] == value for name, values in columns.items() for value in set(values)}
    found, _ = compare(members, is_solved_N, row_N)
    return {name for name, result in found.items() if result.is_weak}


@pytest.mark.parametrize("num_samples", [1, 4])
def test_a_planted_weak_slice_is_named_in_nine_of_ten_evaluations(num_samples):
    found = [simulated(seed, weak=0.4, num_samples=num_samples) for seed in range(10)]
    assert sum(names == {"topic 3"} for names in found) >= 9


@pytest.mark.parametrize("num_samples", [1, 4])
def test_no_slice_is_named_in_nine_of_ten_sound_evaluations(num_samples):
    found = [simulated(seed, weak=None, num_samples=num_samples) for seed in range(100)]
    assert sum(not names for names in found) >= 95
