"""Resource usage of a process tree, measured from outside (on Linux; elsewhere only wall-clock time is measured).

It reads /proc for processor seconds, memory, tasks, and what they wait for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)
MAX_TASKS_READ = 128
"""Largest number of tasks of one process that are read. A program must not have more; its tree is stopped if it does.
"""


@dataclass
class Usage:
    """cpu_s: processor seconds, including those of exited children.

    memory_bytes: resident memory; a shared page counts once for each process, so that shared memory is not missed.
    active_s: total seconds that the current tasks were on a processor or waited for one; it decreases when a task ends.
    is_ready: a task is on a processor or waits for one. is_blocked: a task waits for a disk.
    """

    cpu_s: float = 0.0
    memory_bytes: int = 0
    num_tasks: int = 0
    active_s: float = 0.0
    is_ready: bool = False
    is_blocked: bool = False


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process; empty if it has exited."""
    children: list[int] = []
    with contextlib.suppress(*_GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{task}/children") as file:
                children += [int(child) for child in file.read().split()]
    return children


def tree_of(pid: int) -> list[int]:
    """A process and its descendants."""
    found, waiting = [], [pid]
    while waiting:
        member = waiting.pop()
        found.append(member)
        waiting += children_of(member)
    return found


def queued_here_s() -> float:
    """Seconds that the calling thread has waited for a processor since it started."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def usage_below(root: int, ours: Collection[int] = ()) -> Usage:
    """Usage of the tree below `root`. Memory and tasks of `root` and of the processes `ours` do not count.

    Only the processor time of exited children of `root` counts, but a tree is ready if `root` is, which has to report
    the end of a run.
    """
    usage = Usage()
    for pid in tree_of(root):
        with contextlib.suppress(*_GONE, ValueError, IndexError):
            _add_process(usage, pid, is_root=pid == root, is_ours=pid == root or pid in ours)
    return usage


def _add_process(usage: Usage, pid: int, *, is_root: bool, is_ours: bool) -> None:
    user, system, children_user, children_system = (int(field) for field in _stat_of(f"/proc/{pid}")[11:15])
    usage.cpu_s += (children_user + children_system) / _TICKS
    if not is_root:
        usage.cpu_s += (user + system) / _TICKS
    tasks = os.listdir(f"/proc/{pid}/task")
    if not is_ours:
        with open(f"/proc/{pid}/statm") as statm:
            usage.memory_bytes += int(statm.read().split()[1]) * _PAGE_BYTES
        usage.num_tasks += len(tasks)
    for task in islice(tasks, MAX_TASKS_READ):
        with contextlib.suppress(*_GONE):
            _add_task(usage, f"/proc/{pid}/task/{task}")


def _add_task(usage: Usage, folder: str) -> None:
    state = _stat_of(folder)[0]
    usage.is_ready |= state == b"R"
    usage.is_blocked |= state == b"D"
    with open(f"{folder}/schedstat") as schedstat:
        on_processor, queued, _ = schedstat.read().split()
    usage.active_s += (int(on_processor) + int(queued)) / 1e9


def _stat_of(folder: str) -> list[bytes]:
    """Fields of `stat` from the third on, the state."""
    with open(f"{folder}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2].split()
