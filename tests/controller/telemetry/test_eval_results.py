"""Mean accuracy and pass@k, against NumPy."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from controller.config.eval_metrics import chosen_ks
from controller.data.eval_layout import EvalLayout, SetSize
from controller.telemetry.eval_results import metrics_of, pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 9) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_papers_product_and_the_count_over_all_draws(n: int, c: int, k: int) -> None:
    product = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))  # Chen et al., figure 3
    drawn = [any(one < c for one in chosen) for chosen in itertools.combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(product)
    assert pass_at_k(n, c, k) == pytest.approx(np.mean(drawn))


def test_more_than_all_answers_cannot_be_drawn() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match=rf"answers \(4\), but is {k}"):
            pass_at_k(4, 1, k)


def test_one_set_with_one_answer_per_row_has_an_accuracy_alone() -> None:
    assert metrics_of((1.0, 0.0, None, 1.0)) == {"accuracy": pytest.approx(2 / 3)}
    assert metrics_of((None, None)) == {}
    assert chosen_ks(1) == ()
    assert chosen_ks(6) == (1, 2, 4, 6)


def test_answers_to_the_red_team_do_not_count_for_the_accuracy() -> None:
    layout = EvalLayout({"": SetSize(3, 3, 2), "red_team": SetSize(2, 2, 2)}, red_team="red_team")
    assert [layout.is_red_team(number) for number in range(5)] == [False, False, True, True, False]
    values = (1.0, 0.0, 1.0, 1.0, 0.0)
    assert metrics_of(values, layout) == {"accuracy": pytest.approx(1 / 3)}
    assert layout.counted(values) == (1.0, 0.0, None, None, 0.0)
    several = EvalLayout({"a": SetSize(1, 1, 1), "b": SetSize(1, 1, 1), "r": SetSize(1, 1, 1)}, red_team="r")
    assert metrics_of((1.0, 0.0, 1.0), several) == {"accuracy": 0.5, "accuracy/a": 1.0, "accuracy/b": 0.0}


@pytest.mark.parametrize("seed", range(5))
def test_numbers_by_set_and_their_mean(seed: int) -> None:
    draws = random.Random(seed)
    layout = EvalLayout({"a": SetSize(5, 3, 2), "b": SetSize(9, 6, 1)}, num_samples=4)
    values = [draws.choice([0.0, 0.5, 1.0, 2.0, None]) for _ in range(layout.num_final)]
    found, expected = metrics_of(values, layout), {}
    for name, num_rows in (("a", 3), ("b", 6)):
        rows = [
            [v for n, v in enumerate(values) if layout[n][:2] == (name, row) and v is not None]
            for row in range(num_rows)
        ]
        expected[f"accuracy/{name}"] = np.mean([value for row in rows for value in row])
        for k in (1, 2, 4):
            each = []
            for row in rows:
                n, c = len(row), sum(value >= 1 for value in row)
                if n >= k:
                    each.append(1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))
            if each:
                expected[f"pass_at_{k}/{name}"] = np.mean(each)
    for name in ("accuracy", "pass_at_1", "pass_at_2", "pass_at_4"):
        if parts := [expected[f"{name}/{of}"] for of in "ab" if f"{name}/{of}" in expected]:
            expected[name] = np.mean(parts)
    assert found == pytest.approx(expected)
