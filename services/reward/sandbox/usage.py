"""What a process tree uses, seen from outside (Linux; elsewhere nothing is seen and only time on the wall counts).

Owns: reading /proc for one tree: processor seconds, memory, tasks, seconds kept waiting for a processor.
Refuses: judging it (run).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass
class Usage:
    """queued_s: the longest that any one task stood ready without getting a processor.

    memory_bytes: resident; a page that processes share counts once for each, so that nothing shared escapes.
    """

    cpu_s: float = 0.0
    memory_bytes: int = 0
    num_tasks: int = 0
    queued_s: float = 0.0


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process; empty when it is gone."""
    children: list[int] = []
    with contextlib.suppress(*_GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{task}/children") as file:
                children += [int(child) for child in file.read().split()]
    return children


def tree_of(pid: int) -> list[int]:
    """A process and all below it."""
    found, waiting = [], [pid]
    while waiting:
        member = waiting.pop()
        found.append(member)
        waiting += children_of(member)
    return found


def usage_below(root: int, *, with_root: bool) -> Usage:
    """Usage of the tree; the root's own only as far as it waited for children that ended, unless `with_root`."""
    usage = Usage()
    for pid in tree_of(root):
        with contextlib.suppress(*_GONE, ValueError, IndexError):
            _add_process(usage, pid, is_counted=with_root or pid != root)
    return usage


def _add_process(usage: Usage, pid: int, is_counted: bool) -> None:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    user, system, children_user, children_system = (int(field) for field in fields[11:15])
    usage.cpu_s += (children_user + children_system) / _TICKS
    if not is_counted:
        return
    usage.cpu_s += (user + system) / _TICKS
    with open(f"/proc/{pid}/statm") as statm:
        usage.memory_bytes += int(statm.read().split()[1]) * _PAGE_BYTES
    tasks = os.listdir(f"/proc/{pid}/task")
    usage.num_tasks += len(tasks)
    for task in tasks[:8]:
        with contextlib.suppress(*_GONE), open(f"/proc/{pid}/task/{task}/schedstat") as schedstat:
            usage.queued_s = max(usage.queued_s, int(schedstat.read().split()[1]) / 1e9)
