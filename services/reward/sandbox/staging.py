"""For root only: makes the interpreter's folders reachable for an unprivileged user, in a private mount namespace.

If the service is root, programs and bubblewrap run with a separate user id, which cannot reach a Python below /root. In
a private mount namespace this process binds the folders to a reachable path; both disappear with the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import tempfile

_CLONE_NEWNS = 0x0002_0000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 1 << 18, 0x2, 0x4
_PLACES = ("/mnt", "/media", "/srv", "/opt", "/sys")
"""System folders, one of which is covered; programs do not need them."""


def is_reachable(path: str) -> bool:
    """Whether any user can reach and read this file or folder."""
    parts = path.rstrip("/").split("/")
    for number in range(1, len(parts)):
        mode = os.stat("/".join(parts[:number]) or "/").st_mode
        if not mode & stat.S_IXOTH:
            return False
    mode = os.stat(path).st_mode
    return bool(mode & stat.S_IROTH) and (not stat.S_ISDIR(mode) or bool(mode & stat.S_IXOTH))


def stage(paths: tuple[str, ...]) -> dict[str, str]:
    """Bind those of `paths` that other users cannot reach to reachable paths; returns path -> reachable path.

    Raises OSError if this process must not mount.
    """
    hidden = [path for path in paths if not is_reachable(os.path.realpath(path))]
    if not hidden:
        return {}
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.unshare(_CLONE_NEWNS), "unshare")
    _must(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "make private")
    needed = {*paths, *sys.path, sys.prefix, sys.executable, os.getcwd(), tempfile.gettempdir()}
    places = [place for place in _PLACES if os.path.isdir(place) and not any(_holds(place, path) for path in needed)]
    if not places:
        raise OSError(errno.ENOENT, f"none of {', '.join(_PLACES)} can be used as a mount point")
    place = places[0]
    flags = _MS_NOSUID | _MS_NODEV
    _must(libc.mount(b"tmpfs", place.encode(), b"tmpfs", flags, b"size=64k,mode=0755"), f"mount over {place}")
    staged = {}
    for number, path in enumerate(hidden):
        target = f"{place}/{number}"
        if os.path.isdir(path):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _must(libc.mount(path.encode(), target.encode(), None, _MS_BIND, None), f"bind {path}")
        staged[path] = target
    return staged


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _must(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
