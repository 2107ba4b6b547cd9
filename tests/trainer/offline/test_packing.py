"""Claims about steps and micro-batches of a run from files."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trainer.offline.packing import Item, Schedule, micro_batches, packed


def item(*lengths: int) -> Item:
    tokens = tuple(np.arange(length, dtype=np.int32) for length in lengths)
    return Item("rows:1", tokens, tuple(np.arange(length) > 0 for length in lengths))


def test_an_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    schedule = Schedule(num_rows=10, batch_size=4, epochs=2, seed=3)
    assert schedule.num_steps == 6
    steps = [schedule.rows_of(step) for step in range(1, 7)]
    assert [len(rows) for rows in steps] == [4, 4, 2, 4, 4, 2]
    first, second = (list(itertools.chain(*epoch)) for epoch in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [round(schedule.epoch_of(step), 2) for step in range(7)] == [0.0, 0.4, 0.8, 1.0, 1.4, 1.8, 2.0]


def test_order_is_a_pure_function_of_seed_and_step() -> None:
    one, same, other = (Schedule(10, 4, 9, seed) for seed in (3, 3, 4))
    assert one.rows_of(5) == same.rows_of(5) != other.rows_of(5)


@pytest.mark.parametrize(("max_steps", "expected"), [(None, 6), (2, 2), (9, 6)])
def test_max_steps_only_ends_earlier(max_steps: int | None, expected: int) -> None:
    assert Schedule(10, 4, 2, 3, max_steps).num_steps == expected


def test_sequences_of_a_row_stay_together_within_the_budget() -> None:
    items = [item(3, 4), item(5), item(2, 2), item(20, 20)]
    batches = list(micro_batches(items, 12))
    assert sorted(id(one) for batch in batches for one in batch) == sorted(id(one) for one in items)
    assert all(sum(one.num_tokens for one in batch) <= 12 or len(batch) == 1 for batch in batches)
    assert packed([items[0], items[1]]).lengths == (3, 4, 5)
    assert items[0].num_targets == 5
