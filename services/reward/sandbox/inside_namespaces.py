"""The inside of a sandbox in which each run of a program has separate namespaces within those of the sandbox.

It starts the process of a run in new process, mount and IPC namespaces, with new, empty /tmp and /dev/shm.
inside_confine drops the privileges needed for that before the program runs.

Runs of one program share a sandbox, because starting one costs several times more than a run. They must share nothing
that one run could change and the next one could see: no file, and no process id, which would count the runs. The first
process of the sandbox keeps CAP_SYS_ADMIN over the sandbox's own user namespace for this; it never runs code of a
program.
Like the other `inside_*` it is passed as code and executed in their common namespace.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NEW_MOUNTS, _NEW_IPC, _NEW_PIDS, _SIGCHLD = 0x0002_0000, 0x0800_0000, 0x2000_0000, 17
_NO_SETUID, _NO_DEVICES = 0x2, 0x4
WRITABLE = (b"/tmp", b"/dev/shm")


def fork_run(settings: dict[str, Any]) -> tuple[int, int]:
    """Fork the process of a run. Returns (process id, descriptor from which its wait status is read, -1 for none).

    The process id is 0 in the process of the run, as with os.fork.
    """
    if not settings["fresh"]:
        return os.fork(), -1
    libc = ctypes.PyDLL(None, use_errno=True)
    read_fd, write_fd = os.pipe()
    namespaces = _NEW_MOUNTS | _NEW_IPC | _NEW_PIDS
    pid = int(libc.syscall(settings["fresh"]["clone_call"], namespaces | _SIGCHLD, 0, 0, 0, 0))
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    if pid:
        os.close(write_fd)
        return pid, read_fd
    os.close(read_fd)
    try:
        program = _fork_with_empty_folders(libc, settings["fresh"]["tmp_bytes"])
        if program == 0:
            os.close(write_fd)
            return 0, -1
        os.write(write_fd, b"%d" % wait_for(program))
    finally:
        if os.getpid() == 1:  # the exit of process 1 kills all processes of its namespace
            os._exit(0)
    raise AssertionError("process 1 of the namespace did not exit")


def _fork_with_empty_folders(libc: ctypes.PyDLL, tmp_bytes: int) -> int:
    for folder in WRITABLE:
        options = b"size=%d,mode=0755" % tmp_bytes
        if libc.mount(b"tmpfs", folder, b"tmpfs", _NO_SETUID | _NO_DEVICES, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")
    os.chdir("/tmp")  # the current folder was on the covered file system
    return os.fork()


def status_from(fd: int) -> int | None:
    """The wait status that the first process of a run wrote; None if it failed."""
    text = os.read(fd, 64)
    os.close(fd)
    return int(text) if text else None


def wait_for(pid: int) -> int:
    """The wait status of a child; orphans are reaped meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status
