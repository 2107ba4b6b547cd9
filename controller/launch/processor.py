"""Processor time of processes of this machine with their descendants, their waits for a core, and their memory.

Assigns each descendant to a process and sums up. Processes on other machines are measured by their seats; rates are
computed in controller/report/cores.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection

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
    found = {root: _of_tree(root, roots, _own_s if root == starter else _spent_s) for root in roots}
    return {root: spent for root, spent in found.items() if spent is not None}


def queue_seconds(roots: Collection[int]) -> dict[int, float]:
    """Seconds that threads were ready to run and waited for a core so far, by process id, all threads together.

    Descendants are assigned as in `cpu_seconds`. Time of threads that have ended is lost, so the number can decrease.
    Empty where the operating system does not report it (field 2 of /proc/<pid>/task/<tid>/schedstat on Linux).
    """
    found = {root: _of_tree(root, roots, _queued_s) for root in roots}
    return {root: queued for root, queued in found.items() if queued is not None}


def machine_busy_s() -> float:
    """Seconds that the cores of this machine have worked since it was started, summed over its cores.

    Includes the time that a hypervisor gave to other machines.
    """
    now = psutil.cpu_times()
    idle = now.idle + getattr(now, "iowait", 0.0)
    twice = getattr(now, "guest", 0.0) + getattr(now, "guest_nice", 0.0)  # contained in user and nice
    return float(sum(now) - idle - twice)


def rss_mb(pid: int) -> float | None:
    """Resident memory of a process of this machine in MiB, without its children; None if unknown."""
    try:
        return round(psutil.Process(pid).memory_info().rss / 2**20, 1)
    except psutil.Error:
        return None


def _of_tree(root: int, roots: Collection[int], of_one: Callable[[int], float | None]) -> float | None:
    total_s = of_one(root)
    if total_s is None:
        return None
    waiting = children_of(root)
    while waiting:
        pid = waiting.pop()
        if pid not in roots:
            total_s += of_one(pid) or 0.0  # it may have exited meanwhile
            waiting += children_of(pid)
    return total_s


def _own_s(pid: int) -> float | None:
    """Processor time of one process."""
    return _times_s(pid, with_ended=False)


def _spent_s(pid: int) -> float | None:
    """Processor time of one process and of its exited children that it waited for, which only Linux reports."""
    return _times_s(pid, with_ended=True)


def _times_s(pid: int, *, with_ended: bool) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    own_s = float(times.user + times.system)
    return own_s + float(times.children_user + times.children_system) if with_ended else own_s


def _queued_s(pid: int) -> float | None:
    """Of all threads of one process; None if unknown."""
    tasks, total_ns = f"/proc/{pid}/task", 0
    try:
        threads = os.listdir(tasks)
    except OSError:
        return None
    is_known = False
    for thread in threads:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"{tasks}/{thread}/schedstat", "rb") as file:
            total_ns += int(file.read().split()[1])
            is_known = True
    return total_ns / 1e9 if is_known else None
