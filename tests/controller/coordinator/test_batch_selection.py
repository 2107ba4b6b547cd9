"""Which groups are given up since no step may use them any more."""

from __future__ import annotations

from typing import Any

import pytest

from controller.coordinator.batch_selection import choose_batch, overdue_groups, surplus_groups
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings


def state_of(num_groups: int, **settings: Any) -> RunState:
    """Groups of version 0 with one sample each; nothing was shipped yet."""
    state = RunState(CoordinatorSettings(**{"groups_per_step": 1, "group_size": 1, "num_steps": 9, **settings}))
    for group_id in range(num_groups):
        state.groups.table.add(group_id, 0)
    return state


@pytest.mark.parametrize(
    ("settings", "given_up"),
    [
        ({"max_staleness": 1}, 1), ({"max_staleness": 2}, 0), ({"max_staleness": 0}, 2), ({"max_staleness": None}, 0),
        ({"max_staleness": 0, "on_stale": "keep"}, 0), ({"max_staleness": 0, "on_stale": "drop"}, 0),
    ],
)  # fmt: skip
def test_groups_that_cannot_all_meet_a_tightened_bound_are_given_up_where_steps_wait(
    settings: dict[str, Any], given_up: int
) -> None:
    assert len(surplus_groups(state_of(3, **settings))) == given_up


def test_of_too_many_groups_those_with_the_fewest_finished_samples_go() -> None:
    state = state_of(3, max_staleness=1)
    for group_id in (0, 2):
        sample = state.groups.table.live[group_id].samples[0]
        sample.is_finished, sample.first_version, sample.last_version, sample.num_tokens = True, 0, 0, 5
        state.groups.table.refresh(state.groups.table.live[group_id])
    assert [group.group_id for group in surplus_groups(state)] == [1]


@pytest.mark.parametrize(
    ("settings", "shipped", "overdue"),
    [
        ({"max_staleness": 1, "on_stale": "drop"}, 1, 0), ({"max_staleness": 1, "on_stale": "drop"}, 2, 1),
        ({"max_staleness": 1, "on_stale": "keep"}, 9, 0), ({"max_staleness": None, "on_stale": "drop"}, 9, 0),
    ],
)  # fmt: skip
def test_a_group_is_overdue_when_the_next_step_may_not_use_its_first_token(
    settings: dict[str, Any], shipped: int, overdue: int
) -> None:
    state = state_of(2, **settings)
    sample = state.groups.table.live[0].samples[0]
    sample.first_version, sample.last_version, sample.num_tokens = 0, 0, 5
    state.groups.table.refresh(state.groups.table.live[0])
    state.trainer.shipped = shipped
    assert [group.group_id for group in overdue_groups(state)] == [0] * overdue


def test_an_overdue_group_is_found_among_newer_ones() -> None:
    state = state_of(1, max_staleness=1, on_stale="drop")
    state.groups.table.add(1, 5)
    for group in state.groups.table.live.values():
        sample = group.samples[0]
        sample.first_version = sample.last_version = group.version
        sample.num_tokens = 5
        state.groups.table.refresh(group)
    state.trainer.shipped = 2
    assert [group.group_id for group in overdue_groups(state)] == [0]


def with_groups(ready: dict[int, int], running: dict[int, int], **settings: Any) -> RunState:
    """Groups by id with the version of their only sample; two make a step."""
    state = state_of(0, groups_per_step=2, **settings)
    table = state.groups.table
    for group_id, version in sorted((ready | running).items()):
        group = table.add(group_id, version)
        if group_id in ready:
            sample = group.samples[0]
            sample.is_finished, sample.first_version, sample.last_version = True, version, version
            table.mark_ready(group)
    return state


def chosen(state: RunState) -> list[int] | None:
    batch = choose_batch(state)
    return None if batch is None else [group.group_id for group in batch]


@pytest.mark.parametrize("settings", [{"max_staleness": 1}, {"max_staleness": 1, "on_stale": "keep"}])
def test_a_step_waits_until_it_has_all_its_groups(settings: dict[str, Any]) -> None:
    assert chosen(with_groups({0: 0}, {1: 0}, **settings)) is None
    assert chosen(with_groups({0: 0, 1: 0}, {}, **settings)) == [0, 1]


def test_a_step_takes_the_groups_with_the_earliest_deadline_in_the_order_of_their_ids() -> None:
    assert chosen(with_groups({3: 0, 1: 1, 2: 0, 0: 1}, {}, max_staleness=1)) == [2, 3]


@pytest.mark.parametrize(
    ("ready", "running", "is_shipped"),
    [
        ({3: 1, 4: 1}, {0: 0, 1: 0}, True), ({3: 1, 4: 1}, {0: 0, 1: 0, 2: 0}, False),
        ({2: 0, 3: 1}, {0: 0, 1: 0}, True), ({2: 0, 3: 0}, {0: 0, 1: 0}, True),
        ({2: 0, 3: 1, 4: 1, 5: 1}, {0: 0, 1: 0}, True), ({2: 0, 3: 1, 4: 1, 5: 1}, {0: 0, 1: 0, 6: 0}, False),
        ({2: 0, 3: 1, 4: 1}, {0: 0, 1: 0, 5: 1}, True), ({2: 0, 3: 1, 4: 1}, {0: 0, 1: 0, 5: 1, 6: 1}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("on_stale", "waits"), [("wait", True), ("keep", False)])
def test_a_step_ships_only_what_leaves_the_others_their_deadlines(
    ready: dict[int, int], running: dict[int, int], is_shipped: bool, on_stale: str, waits: bool
) -> None:
    """Step 1 under the bound 1: two of version 0 may be left, which step 2 uses, and four of both versions."""
    state = with_groups(ready, running, max_staleness=1, on_stale=on_stale)
    assert (chosen(state) is not None) == (is_shipped or not waits)
