"""Files that a user names: refused with words where reading them would wait or never end.

Owns: `check_regular`. Refuses: opening, contents.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from areal_like.errors import UserError

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"),
          (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))  # fmt: skip


def check_regular(path: Path, *, where: str = "", max_bytes: int | None = None) -> None:
    """Raise UserError where `path` is there and no regular file (a pipe, a device: /dev/zero never ends), or larger
    than `max_bytes`. `where`: how the user named it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return  # the caller that opens it says what is wrong
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise UserError(f"is {name}, not a file", where=where or str(path), remedy="save the contents to a file")
    if max_bytes is not None and status.st_size > max_bytes:
        size = f"{status.st_size / 2**20:.0f} MiB, more than {max_bytes / 2**20:.0f} MiB"
        raise UserError(f"is too large ({size})", where=where or str(path), remedy="name the right file")
