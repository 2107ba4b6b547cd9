"""Which groups are given up since no step may use them any more."""

from __future__ import annotations

from typing import Any

import pytest

from controller.coordinator.batch_selection import overdue_groups, surplus_groups
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
