"""The parent of one SGLang server. Run as a script: `python -I -S guard.py COMMAND...`; the standard library only.

Owns: that nothing of the server's family outlives the worker that wanted it, nor the server itself, at whatever moment
either dies. Refuses: everything else. Its standard input is a pipe whose other end only that worker holds: it ends
when the worker does, however that happened, and then the family is killed.

Why a process of its own. SGLang's processes ask the kernel to die with their parent, but only once they have imported
everything, many seconds after their start, and a parent that is gone by then is not noticed any more. The guard is the
family's subreaper, so whoever loses its parent becomes the guard's child and is found.

It ends as the server did: with the same status, or by the same signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 8.0
"""Killed processes are gone by then, unless the kernel holds them."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Meant for the worker, whose end is ours."""


def main(command: list[str]) -> None:
    """Start `command`, wait for its end or the worker's, kill what is left."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = os.fork()
    if server == 0:
        _become(command, os.getppid())
    status = _wait(server, wakeup)
    _sweep()
    _end_like(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become(command: list[str], guard: int) -> None:
    """In the child: become the server, and die with the guard."""
    try:
        for number in (*IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _wait(server: int, wakeup: int) -> int | None:
    """The wait status of the server, or None when the worker ended first. Its waker: either end."""
    while True:
        readable, _, _ = select.select([0, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
        for pid, status in iter(_reap, None):
            if pid == server:
                return status
        if 0 in readable and not os.read(0, 4096):
            return None


def _reap() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _sweep() -> None:
    """Kill all descendants, again and again until none is left: those killed late may have started others."""
    deadline_s = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline_s:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while _reap() is not None:
            continue
        if not _descendants():
            return
        time.sleep(0.01)


def _descendants() -> list[int]:
    """Processes below this one, from /proc; none where there is no such thing."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])  # the name in brackets may hold anything
        children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    level = children.get(os.getpid(), [])
    while level:
        found += level
        level = [pid for parent in level for pid in children.get(parent, [])]
    return found


def _end_like(status: int | None) -> None:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1:])
