"""Finds and kills whole process trees, so that no process started by user code is left.

On Linux no process escapes: the service and its child processes are subreapers, so an orphan, daemonised or not,
becomes a child of its subreaper, or of the service if that has exited, and is found there. A tree is stopped before it
is killed: a stopped process cannot fork, so the listing terminates even with a fork bomb. On other systems only
processes that are still connected to the tree are found (psutil).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from areal_like.descendants import children_of, descendants_of

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ROUNDS = 200
_POLL_S = 0.005


def become_subreaper() -> None:
    """Make orphaned descendants children of this process. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(pid: int) -> bool:
    """Whether a process is running; False for a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def living(pids: Iterable[int]) -> set[int]:
    """The process ids that are running."""
    return {pid for pid in pids if is_alive(pid)}


def tree_holds_more_than(pid: int, max_bytes: int) -> int:
    """Resident bytes of a process and its descendants if they exceed `max_bytes`, else 0.

    The cheap sum counts a page that forked processes share once for each. Only if it is too large, shared pages are
    divided among the processes (Linux).
    """
    members = [pid, *descendants_of(pid)]
    if _sum_of_memory(members, "rss") <= max_bytes:
        return 0
    held_bytes = _sum_of_memory(members, "pss" if sys.platform == "linux" else "uss")
    return held_bytes if held_bytes > max_bytes else 0


def _sum_of_memory(pids: list[int], field: str) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            info = process.memory_info() if field == "rss" else process.memory_full_info()
            total += int(getattr(info, field))
    return total


def kill_tree_now(root: int) -> set[int]:
    """Stop and then kill `root` and its descendants. Returns their process ids. Does not wait or reap."""
    members: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        new = {root, *descendants_of(root)} - members
        if not new:
            break
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        members |= new
    for pid in members:
        _signal(pid, signal.SIGKILL)
    return members


async def kill_tree(root: int, deadline_s: float = 2.0) -> set[int]:
    """As `kill_tree_now`, then wait until all of them have exited. Returns those that still run (normally none)."""
    import asyncio  # imported late, because no other import of a scoring process needs it

    members = kill_tree_now(root)
    give_up_s = time.monotonic() + deadline_s
    while (members := living(members)) and time.monotonic() < give_up_s:  # noqa: ASYNC110  (nobody tells us)
        await asyncio.sleep(_POLL_S)
    return members


async def kill_orphans(known: Iterable[int]) -> int:
    """Kill every child process that is not `known`, with its descendants, and reap it. Returns how many were
    running.
    """
    orphans = set(children_of(os.getpid())) - set(known)
    num_running = 0
    for pid in orphans:
        if is_alive(pid):
            num_running += 1
            await kill_tree(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  (does not block)
    return num_running


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has exited, or has changed its user
        os.kill(pid, number)
