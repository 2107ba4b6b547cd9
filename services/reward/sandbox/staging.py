"""Root only: a view of the interpreter's folders that an unprivileged user can reach.

Owns: a mount namespace for this process, and folders bound into it. Refuses: anything another process could see.

Programs run under a user id of their own even where the service is root, and bubblewrap with them; but a Python under
/root cannot be reached by that user. In a mount namespace of its own this process binds the folders to a place that
can; both are gone with the process.
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
"""Folders of the system, one of which is covered; nothing that runs here needs them."""


def is_reachable(path: str) -> bool:
    """True where any user may get to this file or folder and read it."""
    parts = path.rstrip("/").split("/")
    for number in range(1, len(parts)):
        mode = os.stat("/".join(parts[:number]) or "/").st_mode
        if not mode & stat.S_IXOTH:
            return False
    mode = os.stat(path).st_mode
    return bool(mode & stat.S_IROTH) and (not stat.S_ISDIR(mode) or bool(mode & stat.S_IXOTH))


def stage(paths: tuple[str, ...]) -> dict[str, str]:
    """Bind those of `paths` that not everybody can reach to where everybody can: path -> reachable path.

    Raises OSError where this process may not mount.
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
        raise OSError(errno.ENOENT, f"none of {', '.join(_PLACES)} can be covered")
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
