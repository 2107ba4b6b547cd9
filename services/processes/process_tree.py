"""Finding and ending whole process trees, so that nothing user code started stays behind.

Owns: subreaping, stop-then-kill. Refuses: listing (areal_like/descendants.py), deciding who has to go.

Why nothing escapes (Linux): the service and each process below it are subreapers, so an orphan, daemonised or not,
becomes a child of that process, or of the service when it is dead, and is found there. A tree is stopped
before it is killed: a stopped process cannot fork, so the listing comes to an end even against a fork bomb. Elsewhere
only what is still connected to the tree is found (psutil).
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
    """Orphans among our descendants become our children. Does nothing off Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def living(pids: Iterable[int]) -> set[int]:
    """Those that run."""
    return {pid for pid in pids if is_alive(pid)}


def tree_holds_more_than(pid: int, max_bytes: int) -> int:
    """Resident bytes of a process and all below it where they are more than `max_bytes`, else 0.

    The cheap sum counts a page that forked processes share once for each; only when it is too large is a page shared
    by n of them counted as n-ths (Linux).
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
    """SIGKILL to `root` and everything below it, stopped first. Returns whom it was sent to. Does not wait or reap."""
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
    """As `kill_tree_now`, then waits until all of them run no more. Returns those that still do (normally none)."""
    import asyncio  # of a scoring process's imports it was the only one that brought it

    members = kill_tree_now(root)
    give_up_s = time.monotonic() + deadline_s
    while (members := living(members)) and time.monotonic() < give_up_s:  # noqa: ASYNC110  (nobody tells us)
        await asyncio.sleep(_POLL_S)
    return members


async def kill_orphans(known: Iterable[int]) -> int:
    """End every child of ours that is not `known`, with its tree, and reap it. Returns how many ran still."""
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
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; or it changed its user
        os.kill(pid, number)
