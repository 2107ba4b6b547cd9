"""Decides whether one more group may start: `bounded-admission`, the order of `one_step_off`, and the number of groups
that the run still needs.

The worker is chosen in leasing.py.
"""

from __future__ import annotations

from areal_like import staleness
from controller.coordinator.run_parts import GroupState
from controller.coordinator.settings import CoordinatorSettings


def has_draws(groups: GroupState) -> bool:
    """Return whether the data order has rows left."""
    return groups.draws.has_more


def may_start_group(settings: CoordinatorSettings, groups: GroupState, version: int) -> bool:
    """Return whether a worker that loaded `version` may start a new group. This saves compute; the bound itself is
    guaranteed by `bounded-staleness`.
    """
    started = groups.num_started + 1
    if groups.is_exhausted(settings):  # a group that starts now is for a later step: all places of the next count
        started += max(0, settings.groups_per_step - len(groups.table.live))
    if not has_draws(groups) or started > settings.num_steps * settings.groups_per_step:
        return False
    if settings.mode == "one_step_off" and (started - 1) % settings.groups_per_step == 0 and groups.table.num_running:
        return False  # a batch starts only when every group of the previous batch is finished
    return staleness.may_admit(started, version, settings.groups_per_step, settings.bound)
