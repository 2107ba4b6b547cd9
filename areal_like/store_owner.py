"""Ownership of temporary folders (in shared memory and among the runs), and removal of folders whose owner has exited.

A folder is removed only if its record proves that it is ours and its owner has exited: the record was written by this
user, for this very folder (its inode), on this host and in this pid namespace, and by a process that no longer exists
(boot id and start time of the process, so that neither a reused pid nor a changed clock matters). A name proves
nothing, because users have folders called `areal_like-...` too. A folder without a record is removed only if it is
empty.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_like.process import process_identity

STORE_PREFIX = "areal_like-"
SHARED_MEMORY = Path("/dev/shm")
OWNER_FILE = "owner.json"
MADE_BY = "areal_like store"
NEW_S = 3600.0
"""For this long, an empty folder without a record may have just been created."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a folder. `scope` names host and pid namespace, in which the pid is valid."""

    made_by: str
    pid: int
    identity: str
    """Boot and start time of the process (areal_like.process.process_identity)."""
    scope: str
    inode: int
    """Inode of the folder; a copy of the folder belongs to the user."""


def claim(root: Path) -> None:
    """Record that the folder belongs to this process."""
    pid = os.getpid()
    owner = Owner(
        made_by=MADE_BY, pid=pid, identity=process_identity(pid), scope=_scope(), inode=root.stat().st_ino
    )  # fmt: skip
    temporary = root / f"{OWNER_FILE}.tmp"
    temporary.write_bytes(msgspec.json.encode(owner))
    os.replace(temporary, root / OWNER_FILE)


def dead_stores(root: Path = SHARED_MEMORY, prefix: str = STORE_PREFIX) -> Iterator[Path]:
    """Find our folders under `root` whose owner has exited. prefix: of their names."""
    for folder in sorted(root.glob(f"{glob.escape(prefix)}*")):
        if is_dead(folder):
            yield folder


def sweep_dead(root: Path = SHARED_MEMORY, prefix: str = STORE_PREFIX) -> list[Path]:
    """Remove our folders under `root` whose owner has exited, and return them. prefix: of their names."""
    return [folder for folder in list(dead_stores(root, prefix)) if remove_if_dead(folder)]


def remove_if_dead(folder: Path) -> bool:
    """Remove the folder if it is ours and its owner has exited. Returns whether it was removed."""
    if not is_dead(folder):
        return False
    if _owner_of(folder) is None:
        with contextlib.suppress(OSError):  # no longer empty: it is in use
            folder.rmdir()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def is_dead(folder: Path) -> bool:
    """Whether the folder's record proves that it is ours and its owner has exited, or the folder is ours, empty and
    old."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        owner = _owner_of(folder)
        if owner is None:
            return not any(folder.iterdir()) and time.time() - status.st_mtime > NEW_S
    except OSError:
        return False
    if owner.made_by != MADE_BY or owner.inode != status.st_ino or owner.scope != _scope():
        return False
    return process_identity(owner.pid) != owner.identity


def _owner_of(folder: Path) -> Owner | None:
    """The record in a folder of ours; None if it cannot be read or belongs to another user."""
    path = folder / OWNER_FILE
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _scope() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
