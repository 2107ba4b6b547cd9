"""Processes below a process, by their ids.

Owns: listing. Refuses: ending them (services/processes/process_tree.py), what they cost
(controller/launch/processor.py).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def children_of(pid: int) -> list[int]:
    """Process ids of the children of all threads of a process, zombies included; empty when it is gone.

    Asked after every verdict: without objects for paths it takes half as long.
    """
    children: list[int] = []
    tasks = f"/proc/{pid}/task"
    try:
        for task in os.listdir(tasks):
            gone = contextlib.suppress(ProcessLookupError, FileNotFoundError)  # a thread that ended meanwhile
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
