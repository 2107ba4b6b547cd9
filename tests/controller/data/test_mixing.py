"""Mixed sets keep their ratio at any time, each its own order, and every part of the program sees the same rows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_config import make

from controller.data.job_rows import JobRows
from controller.data.mixing import MixedOrder, order_of, weights_at
from controller.data.table import DrawOrder, JoinedTable, load_train

SETS: dict[str, Any] = {
    "data__train": {"generator": "running_sum", "limit": 4},
    "data__mix": [{"generator": "tool_sum", "limit": 3, "ratio": 2.0}],
}


def set_of(order: MixedOrder, sizes: list[int], draw: int) -> int:
    row = order.row_index(draw)
    return next(number for number in range(len(sizes)) if row < sum(sizes[: number + 1]))


@settings(max_examples=num_examples(80), deadline=None)
@given(ratios=st.lists(st.sampled_from([1, 2, 3, 5, 7]), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_each_set_has_its_share_of_any_number_of_draws(ratios: list[int], seed: int) -> None:
    sizes = [3 + number for number in range(len(ratios))]
    order = MixedOrder([DrawOrder(size, seed) for size in sizes], lambda draw: ratios)
    drawn = Counter[int]()
    for draw in range(120):
        drawn[set_of(order, sizes, draw)] += 1
        for number, ratio in enumerate(ratios):
            behind = Fraction(ratio * (draw + 1), sum(ratios)) - drawn[number]
            assert abs(behind) < len(ratios)
    period = sum(ratios)
    fresh = MixedOrder([DrawOrder(size, seed) for size in sizes], lambda draw: ratios)
    first = Counter(set_of(fresh, sizes, draw) for draw in range(period))
    assert [first[number] for number in range(len(ratios))] == ratios, "exactly, after a whole period"


def test_a_set_comes_in_its_own_order_and_whole_before_any_of_its_rows_comes_again() -> None:
    sets = [DrawOrder(5, seed=3), DrawOrder(4, seed=4)]
    order = MixedOrder(sets, lambda draw: [1.0, 2.0])
    rows = [order.row_index(draw) for draw in range(90)]
    own = [[row for row in rows if row < 5], [row - 5 for row in rows if row >= 5]]
    for one, found in zip(sets, own, strict=True):
        assert found == [one.row_index(draw) for draw in range(len(found))]
    assert (len(own[0]), len(own[1])) == (30, 60)


def test_the_row_of_a_position_does_not_depend_on_what_was_asked_before() -> None:
    """As after a resume, which asks for the position that comes next."""
    asked = MixedOrder([DrawOrder(5, 1), DrawOrder(3, 2)], lambda draw: [1.0, 1.0 + draw / 50])
    rows = [asked.row_index(draw) for draw in range(100)]
    fresh = MixedOrder([DrawOrder(5, 1), DrawOrder(3, 2)], lambda draw: [1.0, 1.0 + draw / 50])
    assert fresh.row_index(77) == rows[77]
    assert fresh.row_index(3) == rows[3]
    with pytest.raises(IndexError):
        fresh.row_index(-1)


def test_a_schedule_moves_in_a_straight_line_to_its_end_and_stays_there() -> None:
    mix = [{"generator": "tool_sum", "ratio": 3.0, "end_ratio": 1.0}, {"generator": "tool_sum", "ratio": 0.5}]
    config = make(**{**SETS, "data__mix": mix}, num_steps=3, groups_per_step=7)
    assert weights_at(config, 0) == [1.0, 3.0, 0.5]
    assert weights_at(config, 10) == [1.0, 2.0, 0.5]
    assert weights_at(config, 20) == weights_at(config, 500) == [1.0, 1.0, 0.5]


def test_a_job_reads_all_sets_and_a_resume_notices_a_change_in_any() -> None:
    config = make(**SETS)
    table, rows = load_train(config), JobRows.load(config)
    assert isinstance(table, JoinedTable)
    assert len(table) == 7
    assert [dict(table[index]) for index in range(7)] == [row for part in table.parts for row in part]
    assert [table.where(index) for index in (0, 4)] == ["running_sum row 0", "tool_sum row 0"]
    with pytest.raises(IndexError):
        table[7]
    assert rows.max_draws is None
    order = order_of(config, table)
    assert [rows.train(draw) for draw in range(9)] == [table[order.row_index(draw)] for draw in range(9)]
    other = make(**{**SETS, "data__mix": [{"generator": "tool_sum", "limit": 2, "ratio": 2.0}]})
    assert JobRows.load(other).fingerprints != rows.fingerprints


def test_without_further_sets_the_order_is_that_of_the_one_set() -> None:
    config = make(data__train={"generator": "running_sum", "limit": 5})
    table = load_train(config)
    assert order_of(config, table) == DrawOrder.of(config, table)
