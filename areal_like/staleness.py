"""Rules of admission, consumption and order: pure arithmetic on versions, steps and counts.

It implements `bounded-admission`, `bounded-staleness` and `deadline-order` (arXiv 2505.24298, section 5.1).

Terms: step n turns version n-1 into version n. A group of first version f has staleness (n-1) - f in step n and the
deadline f + bound + 1: the last step that may use it. `bound` is max_staleness, None for unbounded.

Why `may_ship` together with `may_admit` is enough: let U be the set of unshipped groups and, before step n, assume
    (I)  for every m >= n:  #{g in U : deadline(g) <= m}  <=  (m - n + 1) * groups_per_step.
Admission at version v lets U grow to at most (v + bound + 1) * groups_per_step - (n-1) * groups_per_step, which is the
right side of (I) at m = v + bound + 1, the new group's earliest possible deadline; so (I) survives, whatever version
other workers have. Shipping only sets that pass `may_ship` turns (I) for n into (I) for n+1. Drops and filters shrink
U, and first versions, once known, only push deadlines back. By (I) at m = n no group is overdue, and the earliest
groups_per_step groups of U always pass once they are finished: no deadlock. (docs/decisions/0002-coordinator.md)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Mode = Literal["async", "one_step_off", "sync"]
OnStale = Literal["wait", "drop", "keep"]
"""Policies for groups past their deadline (described in areal_like/config.py)."""


class OverAgePolicy(NamedTuple):
    """Properties of a value of `staleness.on_stale`. Code uses these properties, never the name."""

    waits: bool
    """A step waits until its batch leaves no other group that would miss its deadline."""
    is_strict: bool
    """No step uses a group past its deadline (`bounded-staleness`); a policy that does not wait drops such groups."""

    @property
    def loses_slow_groups(self) -> bool:
        """True where groups that take long are dropped, so that training sees shorter answers."""
        return self.is_strict and not self.waits


OVER_AGE: Mapping[OnStale, OverAgePolicy] = {
    "wait": OverAgePolicy(waits=True, is_strict=True),
    "drop": OverAgePolicy(waits=False, is_strict=True),
    "keep": OverAgePolicy(waits=False, is_strict=False),
}
MODE_STALENESS: Mapping[str, int] = {"sync": 0, "one_step_off": 1}
"""Bound of each mode; `async` has none of its own."""


def bound_of(mode: Mode, max_staleness: int | None) -> int | None:
    """Largest allowed staleness of a run.

    Args:
        mode: `sync` and `one_step_off` fix the bound at 0 and 1.
        max_staleness: the bound of `async`; None for unbounded.

    Returns:
        The bound in versions, None for unbounded.

    Example:
        >>> bound_of("sync", 4), bound_of("async", 4)
        (0, 4)
    """
    return MODE_STALENESS.get(mode, max_staleness)


def staleness(step: int, first_version: int) -> int:
    """How many versions behind the policy being trained a group is.

    Args:
        step: the step that uses the group; it trains version `step - 1`.
        first_version: the version that sampled the group's earliest first token.

    Returns:
        The number of versions; 0 is on-policy.

    Example:
        >>> staleness(step=3, first_version=1)
        1
    """
    return step - 1 - first_version


def deadline(first_version: int, bound: int) -> int:
    """The last step that may use a group.

    Args:
        first_version: the version that sampled the group's earliest first token.
        bound: largest allowed staleness, in versions.

    Returns:
        The step's number.

    Example:
        >>> deadline(first_version=0, bound=1)
        2
    """
    return first_version + bound + 1


def is_overdue(step: int, first_version: int, bound: int | None) -> bool:
    """True where a step must not use a group of this first version (`bounded-staleness`).

    Args:
        step: the step that would use the group.
        first_version: the version that sampled the group's earliest first token.
        bound: largest allowed staleness; None for unbounded.

    Returns:
        True past the group's deadline; always False without a bound.

    Example:
        >>> is_overdue(2, 0, bound=1), is_overdue(3, 0, bound=1)
        (False, True)
    """
    return bound is not None and step > deadline(first_version, bound)


def may_admit(started: int, version: int, groups_per_step: int, bound: int | None) -> bool:
    """Whether one more group may start (`bounded-admission`, eq. 3).

    Args:
        started: number of groups that run, wait or were used, including the new one.
        version: the version that the worker which takes the group has loaded.
        groups_per_step: groups of one batch.
        bound: largest allowed staleness; None for unbounded.

    Returns:
        True where the group can still be used in time.

    Example:
        >>> may_admit(4, version=0, groups_per_step=2, bound=1)
        True
        >>> may_admit(5, version=0, groups_per_step=2, bound=1)
        False
    """
    return bound is None or (started - 1) // groups_per_step <= version + bound


def may_ship(step: int, left_by_deadline: Mapping[int, int], groups_per_step: int) -> bool:
    """Whether a step may ship its batch under `wait` without another group missing its deadline (`bounded-staleness`).

    For every m >= step at most (m - step) * groups_per_step of the groups left may have a deadline <= m.

    Args:
        step: the step whose batch would ship.
        left_by_deadline: number of the groups that would remain, by their earliest possible deadline.
        groups_per_step: groups of one batch.

    Returns:
        True where all groups left can still be used in time.

    Example:
        >>> may_ship(1, {2: 2}, groups_per_step=2), may_ship(1, {2: 3}, groups_per_step=2)
        (True, False)
    """
    total = 0
    for limit in sorted(left_by_deadline):
        total += left_by_deadline[limit]
        if total > max(0, limit - step) * groups_per_step:
            return False
    return True


def earliest_first(ready: Mapping[int, Iterable[int]], count: int) -> list[int]:
    """Choose groups in `deadline-order`: the earliest deadline first, then the oldest group.

    Args:
        ready: ids of the groups that are ready, by first version; ids ascend with age.
        count: largest number of groups.

    Returns:
        At most `count` group ids.

    Example:
        >>> earliest_first({1: [4, 5], 0: [3]}, count=2)
        [3, 4]
    """
    chosen: list[int] = []
    for first_version in sorted(ready):
        chosen.extend(heapq.nsmallest(count - len(chosen), ready[first_version]))
        if len(chosen) >= count:
            break
    return chosen


def surplus(step: int, live: Iterable[tuple[int, int, int]], groups_per_step: int) -> list[int]:
    """Choose the groups to drop so that the rest can all meet their deadlines (invariant I).

    Args:
        step: the next step.
        live: (deadline, worth, group id) of each unshipped group; those with the least worth are dropped.
        groups_per_step: groups of one batch.

    Returns:
        Ids of the groups to drop; empty unless the bound was tightened between two sessions of a run.

    Example:
        >>> surplus(1, [(1, 5, 10), (1, 9, 11)], groups_per_step=1)
        [10]
    """
    kept: list[tuple[int, int]] = []
    gone: list[int] = []
    for limit, worth, group_id in sorted(live):
        heapq.heappush(kept, (worth, -group_id))
        while len(kept) > max(0, limit - step + 1) * groups_per_step:
            gone.append(-heapq.heappop(kept)[1])
    return gone
