"""Groups of earlier steps that a step may train on again (`replay_buffer`).

The selection is recorded by batch_shipping.py.

Selection is deterministic: the least reused groups first, then the newest. docs/decisions/0127-replay-buffer.md
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from areal_like import staleness
from controller.coordinator.snapshot import BatchGroup


class ReplayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the buffer, as they are recorded with each lineage."""

    groups_per_step: int
    """Most reused groups of a step."""
    max_age: int
    """Largest staleness of a group in the step that reuses it."""
    max_reuses: int
    """How often a group is reused at most."""


@dataclass(slots=True)
class _Entry:
    group: BatchGroup
    step: int
    """The step that the group was generated for."""
    num_reuses: int = 0


class ReplayBuffer:
    """The groups that later steps may still reuse."""

    def __init__(self, limits: ReplayLimits | None) -> None:
        """limits: None: nothing is reused."""
        self._limits = limits
        self._entries: dict[int, _Entry] = {}

    def choose(self, step: int) -> tuple[BatchGroup, ...]:
        """The groups that this step reuses, by id."""
        if self._limits is None:
            return ()
        usable = [entry for entry in self._entries.values() if self._is_usable(entry, step)]
        usable.sort(key=lambda entry: (entry.num_reuses, -entry.step, -entry.group.group_id))
        chosen = usable[: self._limits.groups_per_step]
        return tuple(sorted((entry.group for entry in chosen), key=lambda group: group.group_id))

    def record(self, step: int, groups: Iterable[BatchGroup], reused: Iterable[BatchGroup]) -> None:
        """A step takes these new groups and these reused ones."""
        if self._limits is None:
            return
        for group in reused:
            if (entry := self._entries.get(group.group_id)) is not None:
                entry.num_reuses += 1
        for group in groups:
            self._entries[group.group_id] = _Entry(group, step)
        self._entries = {
            group_id: entry for group_id, entry in self._entries.items() if self._is_usable(entry, step + 1)
        }

    def keep_only(self, stored: Collection[int]) -> None:
        """Remove all groups but these: the tokens of the others have been deleted."""
        self._entries = {group_id: entry for group_id, entry in self._entries.items() if group_id in stored}

    def _is_usable(self, entry: _Entry, step: int) -> bool:
        limits = self._limits
        return (
            limits is not None
            and entry.num_reuses < limits.max_reuses
            and staleness.staleness(step, entry.group.first_version) <= limits.max_age
        )
