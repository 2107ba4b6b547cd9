"""Child processes and descendants of a process, by process id.

They are terminated in services/processes/process_tree.py.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process, including zombies; empty if the process has exited.

    Called after every verdict, so it avoids Path objects, which would double its time.
    """
    children: list[int] = []
    tasks = f"/proc/{pid}/task"
    try:
        for task in os.listdir(tasks):
            gone = contextlib.suppress(ProcessLookupError, FileNotFoundError)  # a thread that has ended in the meantime
            with gone, open(f"{tasks}/{task}/children", "rb") as file:
                children += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/task").exists():
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = [child.pid for child in psutil.Process(pid).children()]
    return children


def descendants_of(pid: int) -> list[int]:
    """All process ids below `pid`, parents before children."""
    found, waiting = [], children_of(pid)
    while waiting:
        child = waiting.pop()
        found.append(child)
        waiting += children_of(child)
    return found
