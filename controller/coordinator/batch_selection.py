"""Selects the groups of a step, and the groups that can no longer be used (`bounded-staleness`, `deadline-order`).

The selection is recorded by coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_like import staleness
from controller.coordinator.groups import Group
from controller.coordinator.run_state import RunState


def choose_batch(state: RunState) -> list[Group] | None:
    """The groups of the next step by id, or None if it must wait."""
    table, count = state.groups.table, state.settings.groups_per_step
    if table.num_ready < count:
        if not state.groups.is_exhausted(state.settings):
            return None
        count = table.num_ready
    if state.settings.bound is not None and state.settings.over_age.waits:  # by counts: most events change nothing
        taken: dict[int, int] = {}
        wanted = count
        for floor in sorted(table.ready_by_floor):
            taken[floor] = min(wanted, len(table.ready_by_floor[floor]))
            wanted -= taken[floor]
        if not _may_ship(state, taken):
            return None
    chosen = [table.live[group_id] for group_id in staleness.earliest_first(table.ready_by_floor, count)]
    return sorted(chosen, key=lambda group: group.group_id)


def _may_ship(state: RunState, taken: Mapping[int, int]) -> bool:
    """Return whether all other groups can still meet their deadlines when the given number of groups of each floor is
    used.
    """
    bound = state.settings.bound
    assert bound is not None, "without a bound nothing has a deadline"
    by_deadline = {
        staleness.deadline(floor, bound): left
        for floor, number in state.groups.table.num_by_floor.items()
        if (left := number - taken.get(floor, 0))
    }
    return staleness.may_ship(state.trainer.next_step, by_deadline, state.settings.groups_per_step)


def overdue_groups(state: RunState) -> list[Group]:
    """Live groups that cannot be used by the next step or later, whatever their missing samples are.

    Under `wait` there are none (invariant I of areal_like/staleness.py); under `drop` they are dropped.
    """
    if not state.settings.is_strict:
        return []
    bound, step = state.settings.bound, state.trainer.next_step
    oldest = min(state.groups.table.num_by_floor, default=step)
    if not staleness.is_overdue(step, oldest, bound):
        return []  # then no group is overdue; checking all groups after every event would be slow
    return [
        group
        for group in state.groups.table.live.values()
        if (ceiling := group.ceiling) is not None and staleness.is_overdue(step, ceiling, bound)
    ]


def surplus_groups(state: RunState) -> list[Group]:
    """Groups that cannot all meet their deadlines: only after a resume with a tighter bound."""
    bound = state.settings.bound
    if bound is None or not state.settings.over_age.waits:
        return []
    live = (
        (staleness.deadline(group.floor, bound), group.num_finished, group.group_id)
        for group in state.groups.table.live.values()
    )
    return [
        state.groups.table.live[i]
        for i in staleness.surplus(state.trainer.next_step, live, state.settings.groups_per_step)
    ]
