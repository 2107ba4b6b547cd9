"""Processor time of processes of this machine, with whatever they started, and their memory.

Owns: one look at the process table, and whose a child is. Refuses: processes of other machines (their seats tell
theirs); rates (two looks make one: controller/report/cores.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import psutil


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine in MiB, without its children; None when it cannot be known."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


class _Row(NamedTuple):
    parent: int
    times: Any


def cpu_seconds(roots: Collection[int]) -> dict[int, float]:
    """Seconds of processor time so far, by process id, on all cores together.

    Any other process counts for the nearest of its ancestors that is among the roots; one that has ended, for the root
    whose process waited for it. What ended with nobody waiting is lost: the figure can fall. A root that is not there
    is left out.
    """
    table = {
        found.pid: _Row(found.info["ppid"] or 0, found.info["cpu_times"])
        for found in psutil.process_iter(["ppid", "cpu_times"])
        if found.info["cpu_times"] is not None
    }
    spent: defaultdict[int, float] = defaultdict(float)
    for pid, row in table.items():
        if (root := _root_of(pid, roots, table)) is not None:
            spent[root] += row.times.user + row.times.system + row.times.children_user + row.times.children_system
    return dict(spent)


def _root_of(pid: int, roots: Collection[int], table: Mapping[int, _Row]) -> int | None:
    seen = set()
    while pid not in roots:
        if pid in seen or pid not in table:  # a parent that is not there any more, or a process id in use again
            return None
        seen.add(pid)
        pid = table[pid].parent
    return pid
