"""The lock of a run's folder: one controller writes a run at a time.

The kernel releases the lock when the process that holds it exits for any reason.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from areal_like.errors import LedgerError, UserError

LOCK_FILE = "ledger.lock"


def lock_folder(run_dir: Path) -> int:
    """Take the lock of a run.

    Args:
        run_dir: the run's folder.

    Returns:
        A file descriptor; the lock is held until it is closed or the process exits.

    Raises:
        UserError: another process holds the lock, or the folder is not writable or has no locks.
        LedgerError: the disk fails or is full.
    """
    path = run_dir / LOCK_FILE
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"the folder is not writable ({error.strerror})",
            where=str(run_dir),
            remedy="choose a folder to which you can write",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise UserError(
            f"another controller (process {holder or 'unknown'}) has this run open",
            where=str(run_dir),
            remedy="wait for that controller to exit, or stop it",
        ) from error
    except OSError as error:
        os.close(lock)
        raise UserError(
            f"files cannot be locked in this folder ({error.strerror})",
            where=str(run_dir),
            remedy="store runs on a local disk, for example with runs_dir=/local/runs",
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise LedgerError(f"{path} cannot be written ({error.strerror}); check the disk and its free space") from error
    return lock


def lock_holder(run_dir: Path) -> int | None:
    """Id of the process that holds the run's lock; None if the lock is free."""
    try:
        lock = os.open(run_dir / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(lock, 20, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    else:
        return None
    finally:
        os.close(lock)
