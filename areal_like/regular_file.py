"""Checks that a path from the user is a regular file; reading a pipe or a device could block or never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from areal_like.errors import UserError

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))  # fmt: skip


def check_regular(path: Path, *, where: str = "", max_bytes: int | None = None) -> None:
    """Raise UserError if `path` exists but is not a regular file (for example a pipe or a device), or is larger than
    `max_bytes`. `where`: the path or setting as the user wrote it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return  # the caller, which opens it, reports the error
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise UserError(
                f"the path is {name}, not a regular file",
                where=where or str(path),
                remedy="save the contents to a regular file",
            )
    if max_bytes is not None and status.st_size > max_bytes:
        size = f"{status.st_size / 2**20:.0f} MiB, more than {max_bytes / 2**20:.0f} MiB"
        raise UserError(
            f"the file is too large ({size})", where=where or str(path), remedy="check the path, or use a smaller file"
        )
