"""benchmarks/published_batching.py: the pipeline's time, and what the two ways to fill micro-batches are."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import published_batching as batching

SECONDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12)


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (1, 4), (3, 8), (32, 1), (32, 4), (145, 8)])
def test_even_micro_batches_take_the_time_of_the_published_formula(count: int, stages: int) -> None:
    """(m + p - 1) parts, forward and backward (arXiv 2104.04473, section 2.2)."""
    whole = 1.0 + batching.BACKWARD
    assert batching.pipeline_s([1.0] * count, stages) == pytest.approx((count + stages - 1) / stages * whole)


@given(SECONDS, st.integers(1, 6))
def test_uneven_ones_take_at_least_their_work_and_less_than_one_after_the_other(
    forward_s: list[float], stages: int
) -> None:
    work_s = sum(forward_s) * (1.0 + batching.BACKWARD)
    found = batching.pipeline_s(forward_s, stages)
    fill_s = (stages - 1) / stages * min(forward_s) * (1.0 + batching.BACKWARD)
    assert work_s / stages + fill_s <= found * (1 + 1e-9)
    assert found <= work_s * (1 + 1e-9)


def test_a_long_micro_batch_makes_the_other_stages_wait() -> None:
    even, uneven = [2.0] * 8, [1.0] * 7 + [9.0]
    assert batching.pipeline_s(uneven, 1) == batching.pipeline_s(even, 1)
    assert batching.pipeline_s(uneven, 4) > 1.3 * batching.pipeline_s(even, 4)


def test_both_ways_hold_the_same_answers() -> None:
    answers = [100 + 37 * index % 30_000 for index in range(512)]
    fixed, packed = batching.in_equal_numbers(answers), batching.by_tokens(answers)
    assert [len(part) for part in fixed] == [16] * 32
    assert max(sum(part) for part in packed) <= batching.CAPACITY
    assert sorted(chain(*fixed)) == sorted(chain(*packed)) == sorted(answers)


def test_the_prediction_is_within_a_fifth_of_what_was_reported() -> None:
    rows = batching.figure_6a()
    assert [row["model"] for row in rows] == ["1.5b", "7b", "32b"]
    assert all(abs(row["error"]) < 0.2 for row in rows), rows
    assert all(row["by_prompt"] > row["predicted_gain"] for row in rows)
