"""Processor time of processes of this machine, with whatever they started, and their memory.

Owns: whose a child is, and the sum. Refuses: processes of other machines (their seats tell theirs); rates (two looks
make one: controller/report/cores.py).
"""

from __future__ import annotations

from collections.abc import Collection

import psutil

from areal_like.descendants import children_of


def cpu_seconds(roots: Collection[int], *, starter: int | None = None) -> dict[int, float]:
    """Seconds of processor time so far, by process id, on all cores together.

    Any process below the roots counts for the nearest of its ancestors among them, on Linux also one that has ended
    (for the root whose process waited for it). What ended with nobody waiting is lost: the figure can fall. A root that
    is not there is left out.

    starter: the root that starts the others. What has ended below it is not counted for it: the operating system adds
    all that another root has ever spent to the process that waited for its end, the starter or its fork server.
    """
    return {root: spent for root in roots if (spent := _of_tree(root, roots, with_ended=root != starter)) is not None}


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine in MiB, without its children; None when it cannot be known."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


def _of_tree(root: int, roots: Collection[int], *, with_ended: bool) -> float | None:
    total_s = _of_one(root, with_ended)
    if total_s is None:
        return None
    waiting = children_of(root)
    while waiting:
        pid = waiting.pop()
        if pid not in roots:
            total_s += _of_one(pid, with_ended) or 0.0  # it may have ended meanwhile
            waiting += children_of(pid)
    return total_s


def _of_one(pid: int, with_ended: bool) -> float | None:
    """with_ended: and its children that have ended and were waited for; psutil has them on Linux alone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    own_s = float(times.user + times.system)
    return own_s + float(times.children_user + times.children_system) if with_ended else own_s
