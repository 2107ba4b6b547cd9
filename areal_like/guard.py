"""Guarded and tied commands: child processes that exit with the process that started them, however it ends.

Nothing that a guarded command starts outlives it, not even after `kill -9`. This module is also a script:

    python -I -S guard.py tied PID COMMAND...        become the command, which is killed when its parent PID exits
    python -I -S guard.py guarded PID COMMAND...     run the command; kill it and its descendants when process PID exits
    python -I -S guard.py guarded stdin COMMAND...   the same when standard input is closed (the command has none)

As a script it uses the standard library only, so that it starts quickly and imports none of the user's modules.

A separate guard process is needed where the command runs third-party code. Such code starts processes of its own that
do not ask the kernel to kill them with their parent, or ask only after many seconds of imports. The guard is the
subreaper of the process tree, so an orphaned process becomes the guard's child and is found. The kernel's parent-death
signal alone is not enough: orphans would not get it, it is also sent when merely the *thread* that started a process
ends, and it is cleared when a program with other privileges starts.

Programs that are killed leave files in /dev/shm. `guarded(..., shared_memory=PREFIXES)` records the files that
processes of the tree map, in the working folder and while they run, and removes the files with the tree
(`remove_recorded`). If the guard is killed too, the process that removes the folder removes them. A file belongs to the
tree if one of its processes maps it, it is newer than the guard, and its name starts with one of the prefixes.

A guard exits as its command did: with the same status, or by the same signal. The process that started it ends it early
with the signal `END`, never with SIGKILL (`end_guarded` in guarded_process.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 8.0
"""Time in which killed processes exit, unless the kernel blocks them."""
POLL_S = 0.5
"""Interval between checks of the parent where the kernel does not report its exit (not Linux)."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are handled by the starter only; the guard exits when it does."""
END = signal.SIGUSR1
"""Signal that kills the process tree and then ends the guard, as if by SIGKILL."""
STDIN = "stdin"
SHARED_MEMORY = "--shared-memory="
RECORD = "shared-memory"
"""File in the working folder: one line of name, device and inode for each file in /dev/shm to remove."""
RECORD_S = 2.0
"""Interval between checks of the files that the process tree maps."""
SHM = "/dev/shm"


def guarded(command: Sequence[str], *, until: str = "", shared_memory: Sequence[str] = ()) -> list[str]:
    """The command line that runs `command` and kills it, with all its descendants, when this process exits.

    `shared_memory`: prefixes of files in /dev/shm that are removed with the process tree that maps them.

    `until`: STDIN to end it when its standard input is closed. SIGTERM and SIGINT to the guard are not passed on; END
    ends it with all its descendants. SIGKILL to the guard kills the command, but not processes that the command started
    in other sessions.
    """
    option = [SHARED_MEMORY + ",".join(shared_memory)] if shared_memory else []
    return [sys.executable, "-I", "-S", __file__, "guarded", until or str(os.getpid()), *option, *command]


def tied(command: Sequence[str]) -> list[str]:
    """The command line that becomes `command` and exits with this process, or with the thread that starts it. Linux
    only.

    For our own commands, which end their child processes themselves. Signals and the process id are the command's own.
    """
    return [sys.executable, "-I", "-S", __file__, "tied", str(os.getpid()), *command]


def main(mode: str, until: str, *command: str) -> None:
    """Run the script (see the docstring of the module)."""
    if mode == "tied":
        _become(list(command), int(until))
    prefixes: tuple[str, ...] = ()
    if command and command[0].startswith(SHARED_MEMORY):
        prefixes, command = tuple(command[0].removeprefix(SHARED_MEMORY).split(",")), command[1:]
    _guard(until, list(command), prefixes)


def _guard(until: str, command: list[str], prefixes: tuple[str, ...]) -> None:
    """Start `command`, wait until it or the starter exits, kill what is left, and exit with the same status."""
    _end_like(guard_child(until, lambda parent: _become(command, parent), prefixes))


def guard_child(until: str, run: Callable[[int], None], prefixes: tuple[str, ...] = ()) -> int | None:
    """Fork a child and make this process its guard; returns once no process of the tree is left.

    Args:
        until: STDIN or the id of the parent, as in `guarded`.
        run: called in the child with the guard's process id. It must call `become_child` first, and must not return,
            but may raise.
        prefixes: prefixes of files in /dev/shm that are removed with the process tree.

    Returns:
        The child's wait status; None if the starter exited first.
    """
    starter = os.getppid()
    if until not in (STDIN, str(starter)):
        os._exit(1)  # the starter has already exited
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, END):
        signal.signal(number, lambda *_: None)
    end_fd = _end_of(starter) if until != STDIN else 0
    record = _Record(Path.cwd(), prefixes) if prefixes else None
    child = os.fork()
    if child == 0:
        if until == STDIN:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run(os.getppid())
    status = _wait(child, wakeup, end_fd, starter, record)
    if record is not None:
        record.update()
    _sweep()
    if record is not None:
        remove_recorded(Path.cwd())
    return status


def _end_of(pid: int) -> int:
    """A descriptor that becomes readable when process `pid` exits; -1 where that is not supported."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become(command: list[str], parent: int) -> None:
    """Become the command, which is killed when the parent exits."""
    try:
        become_child(parent)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def become_child(parent: int) -> None:
    """Undo, in a forked child, the settings of the guard `parent`; the child is killed when the guard exits."""
    for number in (*IGNORED, signal.SIGCHLD, END):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Record:
    """Record of the process tree's files in /dev/shm, written to disk as soon as they are known."""

    def __init__(self, folder: Path, prefixes: tuple[str, ...]) -> None:
        self._path, self._prefixes, self._started_s = folder / RECORD, prefixes, time.time()
        self._lines: dict[str, str] = {}

    def update(self) -> None:
        """Add the files that the process tree maps now."""
        mapped = {file for pid in _descendants() for file in _mapped(pid)}
        known = len(self._lines)
        for name, found in _candidates(self._prefixes):
            is_ours = found.st_uid == os.getuid() and found.st_ctime >= self._started_s - 1.0
            if is_ours and (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino) in mapped:
                self._lines[name] = f"{name} {found.st_dev} {found.st_ino}\n"
        if len(self._lines) > known:
            with contextlib.suppress(OSError):  # the folder was removed with the worker
                new = self._path.with_suffix(".new")
                new.write_text("".join(self._lines.values()))
                new.replace(self._path)


def _mapped(pid: int) -> set[tuple[int, int, int]]:
    """Device and inode of each file in /dev/shm that a process maps. Names are not compared, because a semaphore is
    mapped under the temporary name that it was created with.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    fields = [line.split(maxsplit=5) for line in lines if f" {SHM}/" in line]
    devices = [(one[3].partition(":"), int(one[4])) for one in fields if len(one) == 6]
    return {(int(major, 16), int(minor, 16), inode) for (major, _, minor), inode in devices}


def _candidates(prefixes: tuple[str, ...]) -> list[tuple[str, os.stat_result]]:
    """Files in /dev/shm whose name starts with one of the prefixes."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(SHM):
            if name.startswith(prefixes) and " " not in name:
                with contextlib.suppress(OSError):
                    found.append((name, os.stat(os.path.join(SHM, name), follow_symlinks=False)))
    return found


def remove_recorded(folder: Path) -> None:
    """Remove the files recorded in `folder`: each only if it is still the same file. Safe to call twice."""
    try:
        lines = (folder / RECORD).read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        name, _, identity = line.partition(" ")
        path = os.path.join(SHM, name)
        with contextlib.suppress(OSError):
            found = os.stat(path, follow_symlinks=False)
            is_same = f"{found.st_dev} {found.st_ino}" == identity and found.st_uid == os.getuid()
            if is_same and "/" not in name:
                os.unlink(path)
    with contextlib.suppress(OSError):
        (folder / RECORD).unlink()


def _wait(child: int, wakeup: int, end_fd: int, starter: int, record: _Record | None) -> int | None:
    """The wait status of the child, or None if the starter exited first. Woken by either exit, by END, or by a
    timeout.
    """
    fds = [wakeup] if end_fd < 0 else [wakeup, end_fd]
    timeout_s = POLL_S if end_fd < 0 else RECORD_S if record is not None else None
    while True:
        readable, _, _ = select.select(fds, [], [], timeout_s)
        if not readable and record is not None:
            record.update()
        is_to_end = wakeup in readable and END in os.read(wakeup, 4096)
        for pid, status in iter(_reap, None):
            if pid == child:
                return status
        if is_to_end:
            return int(signal.SIGKILL)
        if end_fd < 0 and os.getppid() != starter:
            return None
        if end_fd in readable and (end_fd != 0 or not os.read(0, 4096)):
            return None


def _reap() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _sweep() -> None:
    """Kill all descendants repeatedly until none is left, because they may start others before they are killed."""
    deadline_s = time.monotonic() + SWEEP_S
    while not _reap_all() and time.monotonic() < deadline_s:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # it has exited, or belongs to another user (sudo)
                continue
        time.sleep(0.01)


def _reap_all() -> bool:
    """Reap the children that have exited. Returns whether there is no other child, and so no descendant: those whose
    parent exits become children of this process.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return True
    return not Path("/proc/self").exists()  # where nobody can tell, there is nothing to kill


def _descendants() -> list[int]:
    """Descendants of this process, from /proc; empty where /proc does not exist."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])  # the name in brackets may contain anything
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
    try:
        main(*sys.argv[1:])
    except BaseException:  # 1 would be taken for the status of the command
        traceback.print_exc()
        os._exit(127)
