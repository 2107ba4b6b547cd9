"""The rules of admission, consumption and order as pure arithmetic on versions, steps and counts.

Owns: `bounded-admission`, `bounded-staleness` and `deadline-order` (arXiv 2505.24298, section 5.1). Refuses: state,
groups as objects, clocks.

Words: step n turns version n-1 into version n. A group of first version f has staleness (n-1) - f in step n and the
deadline f + bound + 1: the last step that may use it. `bound` is max_staleness, None for unbounded.

Why `may_ship` together with `may_admit` is enough. Call U the unshipped groups and let, before step n is formed,
    (I)  for every m >= n:  #{g in U : deadline(g) <= m}  <=  (m - n + 1) * groups_per_step.
Admission at version v lets U grow to at most (v + bound + 1) * groups_per_step - (n-1) * groups_per_step, which is the
right side of (I) at m = v + bound + 1, the new group's earliest possible deadline; so (I) survives, whatever version
other workers have. Shipping only sets that pass `may_ship` turns (I) for n into (I) for n+1. Drops and filters shrink
U, and first versions, once known, only push deadlines back. By (I) at m = n the overdue never exist, and the earliest
groups_per_step groups of U always pass once they are finished: no deadlock. (docs/decisions/0002-coordinator.md)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Literal

Mode = Literal["async", "one_step_off", "sync"]
OnStale = Literal["wait", "drop", "keep"]
"""What is done about groups past their deadline (areal_like/config.py describes each)."""
MODE_STALENESS: Mapping[str, int] = {"sync": 0, "one_step_off": 1}
"""The bound that a mode fixes; async takes any."""


def bound_of(mode: Mode, max_staleness: int | None) -> int | None:
    """Largest allowed staleness: the one that the mode fixes, else `max_staleness`; None: unbounded."""
    return MODE_STALENESS.get(mode, max_staleness)


def staleness(step: int, first_version: int) -> int:
    """How many versions behind the policy being trained a group is when step `step` uses it."""
    return step - 1 - first_version


def deadline(first_version: int, bound: int) -> int:
    """The last step that may use a group of this first version."""
    return first_version + bound + 1


def is_overdue(step: int, first_version: int, bound: int | None) -> bool:
    """True where step `step` must not use a group of this first version (`bounded-staleness`)."""
    return bound is not None and step > deadline(first_version, bound)


def may_admit(started: int, version: int, groups_per_step: int, bound: int | None) -> bool:
    """`bounded-admission` (eq. 3): may a group start on a worker that loaded `version`, `started` including it?"""
    return bound is None or (started - 1) // groups_per_step <= version + bound


def may_ship(step: int, left_by_deadline: Mapping[int, int], groups_per_step: int) -> bool:
    """`bounded-staleness`, `wait`: may step `step` ship, leaving these numbers of unshipped groups by deadline?

    A deadline is the earliest possible one of its group.

    For every m >= step at most (m - step) * groups_per_step of them may have a deadline <= m.
    """
    total = 0
    for limit in sorted(left_by_deadline):
        total += left_by_deadline[limit]
        if total > max(0, limit - step) * groups_per_step:
            return False
    return True


def earliest_first(ready: Mapping[int, Iterable[int]], count: int) -> list[int]:
    """`deadline-order`: `count` group ids out of `ready` (first version -> group ids).

    The earliest deadline comes first, then the oldest group.
    """
    chosen: list[int] = []
    for first_version in sorted(ready):
        chosen.extend(heapq.nsmallest(count - len(chosen), ready[first_version]))
        if len(chosen) >= count:
            break
    return chosen


def surplus(step: int, live: Iterable[tuple[int, int, int]], groups_per_step: int) -> list[int]:
    """Ids of the groups to give up so that the rest can all meet their deadlines from `step` on (invariant I).

    live: (deadline, worth, group_id); of too many the ones of least worth go. Empty unless the bound was tightened
    between two lives of a run.
    """
    kept: list[tuple[int, int]] = []
    gone: list[int] = []
    for limit, worth, group_id in sorted(live):
        heapq.heappush(kept, (worth, -group_id))
        while len(kept) > max(0, limit - step + 1) * groups_per_step:
            gone.append(-heapq.heappop(kept)[1])
    return gone
