"""Replaces a small file atomically, also on a full disk.

The space for the next replacement is reserved while there is room: in a spare file next to it, which is overwritten in
place and renamed when a new file cannot be written. So the end of a run and its cause are recorded also if a full disk
is that cause. A file system that copies on write may still refuse; the error is then raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from areal_like.durable import flush_to_disk
from areal_like.errors import add_file_name

SPARE_BYTES = 16 << 10
"""Reserved size. Longer contents cannot be written to a full disk."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def spare_of(path: Path) -> Path:
    """The spare file of a file."""
    return path.with_suffix(".spare")


def replace_with_reserve(path: Path, content: bytes) -> None:
    """Replace a file atomically, and reserve space for the next time. Raises OSError."""
    fresh = path.with_suffix(".tmp")
    try:
        with add_file_name(fresh):
            fresh.write_bytes(content)
            flush_to_disk(fresh)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        if error.errno not in FULL or not _replace_by_spare(path, content):
            raise
    else:
        _reserve(spare_of(path))


def _reserve(spare: Path) -> None:
    """Create the spare file unless it exists. Without room there is none."""
    if spare.exists():
        return
    try:
        with spare.open("wb") as file:
            file.write(os.urandom(SPARE_BYTES))  # a file system that compresses reserves all of it too
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            spare.unlink(missing_ok=True)


def _replace_by_spare(path: Path, content: bytes) -> bool:
    """Write the content into the reserved space; return whether it was possible."""
    spare = spare_of(path)
    try:
        if len(content) > spare.stat().st_size:
            return False
        with spare.open("r+b") as file:
            file.write(content)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        spare.replace(path)
    except OSError:
        return False
    return True
