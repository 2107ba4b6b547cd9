"""Prints which resource limits are enforced for this user. Each is tested in a child that exits immediately."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable

BOUND, FREE, CANNOT = 0, 3, 4


def memory() -> bool:
    """Return whether an allocation above the limit fails."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    try:
        bytearray(4 << 30)
    except MemoryError:
        return True
    return False


def file_size() -> bool:
    """Return whether a file cannot grow beyond the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("doctor"), "wb", 0) if in_memory else tempfile.TemporaryFile(buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            return file.write(bytes(8192)) < 8192
        except OSError:
            return True


def open_files() -> bool:
    """Return whether no more files can be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    try:
        for _ in range(16):
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return True
    return False


def processes() -> bool:
    """Return whether no child can be started; this limit does not apply to the superuser."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        child = os.fork()
    except OSError:
        return True
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return False


def cpu_time() -> bool:
    """Return whether the limit can be set and read back. It is not tested, because that would take a second of
    processor time.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    return resource.getrlimit(resource.RLIMIT_CPU) == (60, 60)


def tried(trial: Callable[[], bool]) -> str:
    """`bound`, `free`, or `refused` if the limit cannot be set; tested in a child."""
    child = os.fork()
    if child == 0:
        status = CANNOT
        try:
            status = BOUND if trial() else FREE
        except (OSError, ValueError):
            status = CANNOT
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {BOUND: "bound", FREE: "free"}.get(status, "refused")


def main() -> None:
    trials = {
        "memory": memory, "file size": file_size, "open files": open_files, "processes": processes,
        "processor time": cpu_time,
    }  # fmt: skip
    facts = {"limits": {name: tried(trial) for name, trial in trials.items()}, "uid": os.getuid()}
    print("areal_like-doctor " + json.dumps(facts), flush=True)


main()
