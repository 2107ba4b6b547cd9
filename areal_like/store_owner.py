"""Folders that must not outlive their process, in shared memory and among the runs: who owns one, and what the dead
have left.

Owns: the owner record, `claim`, finding and removing folders of dead owners. Refuses: what is in them (weight_store.py,
rollout/weights/local_versions.py).

A folder is removed only where its own record proves that it is ours and dead: written by this user, for this very
folder (its inode), on this host and in this pid namespace, for a process that is gone (boot id and start time of the
process, so that neither a reused pid nor a clock that was set counts). A name proves nothing: users have folders
called `areal_like-...` too. Without a record a folder goes only if it is empty.
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
"""An empty folder without a record is somebody's who has just made it, for so long."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose folder it is. `scope` names host and pid namespace: elsewhere a pid means nothing."""

    made_by: str
    pid: int
    identity: str
    """Boot and start time of the process (areal_like.process.process_identity)."""
    scope: str
    inode: int
    """Of the folder: a copy of it is the user's own."""


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
    """Folders of ours under `root` whose owner is dead. Removes nothing. prefix: of their names."""
    for folder in sorted(root.glob(f"{glob.escape(prefix)}*")):
        if is_dead(folder):
            yield folder


def sweep_dead(root: Path = SHARED_MEMORY, prefix: str = STORE_PREFIX) -> list[Path]:
    """Remove the folders of ours under `root` whose owner is dead; returns them. prefix: of their names."""
    return [folder for folder in list(dead_stores(root, prefix)) if remove_if_dead(folder)]


def remove_if_dead(folder: Path) -> bool:
    """Remove the folder if it is ours and dead. True where it was removed."""
    if not is_dead(folder):
        return False
    if _owner_of(folder) is None:
        with contextlib.suppress(OSError):  # not empty any more: somebody's
            folder.rmdir()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def is_dead(folder: Path) -> bool:
    """The folder's record proves that it is ours and its owner gone; or it is ours, empty and old."""
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
    """The record in a folder of ours; None where there is none that can be read, or another user's."""
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
