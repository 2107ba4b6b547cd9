"""Processor time of processes of this machine, with whatever they started, and their memory.

Owns: whose a child is, and the sum. Refuses: processes of other machines (their seats tell theirs); rates (two looks
make one: controller/report/cores.py).
"""

from __future__ import annotations

from collections.abc import Collection

import psutil

from areal_like.descendants import children_of


def cpu_seconds(roots: Collection[int]) -> dict[int, float]:
    """Seconds of processor time so far, by process id, on all cores together.

    Any process below the roots counts for the nearest of its ancestors among them, on Linux also one that has ended
    (for the root whose process waited for it). What ended with nobody waiting is lost: the figure can fall. A root that
    is not there is left out.
    """
    return {root: spent for root in roots if (spent := _of_tree(root, roots)) is not None}


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine in MiB, without its children; None when it cannot be known."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


def _of_tree(root: int, roots: Collection[int]) -> float | None:
    total_s = _of_one(root)
    if total_s is None:
        return None
    waiting = children_of(root)
    while waiting:
        pid = waiting.pop()
        if pid not in roots:
            total_s += _of_one(pid) or 0.0  # it may have ended meanwhile
            waiting += children_of(pid)
    return total_s


def _of_one(pid: int) -> float | None:
    """With children that have ended and were waited for; psutil has them on Linux alone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system + times.children_user + times.children_system)
