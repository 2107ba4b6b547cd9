"""`bounded-admission`, `bounded-staleness` and `deadline-order` as arithmetic."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like import staleness


def test_staleness_and_deadline_follow_the_definitions() -> None:
    assert staleness.staleness(step=5, first_version=2) == 2
    assert staleness.deadline(first_version=2, bound=4) == 7
    assert not staleness.is_overdue(7, 2, 4)
    assert staleness.is_overdue(8, 2, 4)
    assert not staleness.is_overdue(10**6, 0, None)


@pytest.mark.parametrize(
    ("started", "version", "bound", "admitted"),
    [(4, 0, 0, True), (5, 0, 0, False), (5, 1, 0, True), (12, 0, 2, True), (13, 0, 2, False), (10**9, 0, None, True)],
)
def test_admission_is_equation_3(started: int, version: int, bound: int | None, admitted: bool) -> None:
    assert staleness.may_admit(started, version, 4, bound) is admitted


def test_shipping_looks_further_than_one_step_ahead() -> None:
    assert staleness.may_ship(2, {4: 2, 5: 9}, 1) is False
    assert staleness.may_ship(2, {4: 2, 5: 1}, 1) is True
    assert staleness.may_ship(2, {4: 3}, 1) is False, "three groups must go within steps 3 and 4"
    assert staleness.may_ship(2, {2: 1}, 8) is False, "what is due now may not stay"
    assert staleness.may_ship(2, {}, 1) is True


def test_earliest_deadline_goes_first_then_the_oldest() -> None:
    ready = {3: {1, 2}, 1: {9, 7}, 2: {4}}
    assert staleness.earliest_first(ready, 4) == [7, 9, 4, 1]
    assert staleness.earliest_first(ready, 1) == [7]
    assert staleness.earliest_first(ready, 9) == [7, 9, 4, 1, 2]


def test_of_too_many_groups_those_of_least_worth_go_and_of_equal_ones_the_newest() -> None:
    assert staleness.surplus(1, [(1, 5, 0), (1, 3, 1), (1, 3, 2)], 1) == [2, 1]
    assert staleness.surplus(1, [(1, 1, 0), (1, 9, 1)], 2) == []
    assert staleness.surplus(1, [(1, 1, 0), (2, 9, 1), (2, 9, 2)], 1) == [0]
    assert staleness.surplus(3, [(1, 9, 0), (2, 9, 1), (3, 9, 2)], 1) == [0, 1]


@given(
    step=st.integers(1, 5),
    deadlines=st.lists(st.integers(0, 9), max_size=12),
    groups_per_step=st.integers(1, 3),
)
def test_surplus_leaves_exactly_what_can_still_ship_in_time(
    step: int, deadlines: list[int], groups_per_step: int
) -> None:
    live = [(limit, 0, group_id) for group_id, limit in enumerate(deadlines)]
    gone = set(staleness.surplus(step, live, groups_per_step))
    kept = [limit for limit, _, group_id in live if group_id not in gone]
    for step_now in range(step, 11):
        rest = sorted(kept)[groups_per_step:]
        assert all(limit >= step_now for limit in kept)
        assert staleness.may_ship(step_now, Counter(rest), groups_per_step)
        kept = rest
    assert gone or staleness.surplus(step, live, groups_per_step) == []


@given(data=st.data(), bound=st.integers(0, 3), groups_per_step=st.integers(1, 3))
def test_admission_and_shipping_together_never_leave_a_group_behind(
    data: st.DataObject, bound: int, groups_per_step: int
) -> None:
    """The invariant of the module's docstring, played with any order of finishing and any lag of versions."""
    unshipped: dict[int, int] = {}
    ready: set[int] = set()
    consumed, drawn, step = 0, 0, 1
    for _ in range(60):
        version = data.draw(st.integers(0, step - 1))
        if data.draw(st.booleans()):
            if staleness.may_admit(consumed + len(unshipped) + 1, version, groups_per_step, bound):
                unshipped[drawn] = version
                drawn += 1
        elif waiting := sorted(set(unshipped) - ready):
            group_id = data.draw(st.sampled_from(waiting))
            unshipped[group_id] = data.draw(st.integers(unshipped[group_id], step - 1))
            ready.add(group_id)
        by_version: dict[int, set[int]] = {}
        for group_id in ready:
            by_version.setdefault(unshipped[group_id], set()).add(group_id)
        chosen = staleness.earliest_first(by_version, groups_per_step)
        left = Counter(unshipped[g] + bound + 1 for g in unshipped if g not in chosen)
        if len(chosen) == groups_per_step and staleness.may_ship(step, left, groups_per_step):
            for group_id in chosen:
                ready.discard(group_id)
                assert staleness.staleness(step, unshipped.pop(group_id)) <= bound
            consumed += groups_per_step
            step += 1
        all_ready = len(ready) == len(unshipped) >= groups_per_step
        assert not all_ready or len(chosen) == groups_per_step
        assert all(version + bound + 1 >= step for version in unshipped.values())


@pytest.mark.parametrize(
    ("mode", "max_staleness", "bound"),
    [("sync", 4, 0), ("one_step_off", None, 1), ("async", 4, 4), ("async", 0, 0), ("async", None, None)],
)
def test_the_mode_fixes_the_bound_or_leaves_it_as_given(
    mode: Any, max_staleness: int | None, bound: int | None
) -> None:
    assert staleness.bound_of(mode, max_staleness) == bound
