"""Processor time of processes of this machine with their descendants, and their memory.

Assigns each descendant to a process and sums up. Processes on other machines are measured by their seats; rates are
computed in controller/report/cores.py.
"""

from __future__ import annotations

from collections.abc import Collection

import psutil

from areal_like.descendants import children_of


def cpu_seconds(roots: Collection[int], *, starter: int | None = None) -> dict[int, float]:
    """Seconds of processor time so far, by process id, on all cores together.

    Each descendant is counted for its nearest ancestor among the roots, on Linux also after it has exited (for the root
    whose process waited for it). The time of a process that exited without being waited for is lost, so the number can
    decrease. A root that does not exist is left out.

    starter: the root that starts the others. Exited descendants are not counted for it: the operating system adds the
    total time of another root to the process that waited for its exit, which is the starter or its fork server.
    """
    return {root: spent for root in roots if (spent := _of_tree(root, roots, with_ended=root != starter)) is not None}


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine in MiB, without its children; None if unknown."""
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
            total_s += _of_one(pid, with_ended) or 0.0  # it may have exited meanwhile
            waiting += children_of(pid)
    return total_s


def _of_one(pid: int, with_ended: bool) -> float | None:
    """with_ended: include exited children that were waited for, which psutil only provides on Linux."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    own_s = float(times.user + times.system)
    return own_s + float(times.children_user + times.children_system) if with_ended else own_s
