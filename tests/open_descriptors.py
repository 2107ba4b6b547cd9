"""The open descriptors of the process that runs the tests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def open_descriptors() -> dict[int, str]:
    """What each descriptor is open on, as the kernel names it (``socket:[12]``, ``/folder/file``).

    A descriptor that vanishes meanwhile is left out: a thread or the garbage collector may close one at any
    moment.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def open_below(folder: Path) -> list[str]:
    """Files below a folder that are open, deleted ones too."""
    return sorted(target for target in open_descriptors().values() if target.startswith(str(folder)))


def num_open_on(inode: int) -> int:
    """Number of descriptors that are open on a file."""
    num = 0
    for number in open_descriptors():
        with contextlib.suppress(OSError):
            num += os.fstat(number).st_ino == inode
    return num


@contextlib.contextmanager
def no_new_descriptors() -> Iterator[None]:
    """Fail if a descriptor that the block opens is still open after it."""
    before = open_descriptors().items()
    yield
    new = open_descriptors().items() - before
    assert not new, f"still open: {sorted(new)}"
