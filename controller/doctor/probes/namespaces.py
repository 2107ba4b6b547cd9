"""Prints which Linux namespaces this user may create. Everything is undone when this process exits.

Creates a user namespace and the others within it.
"""

from __future__ import annotations

import ctypes
import json
import os

USER = 0x10000000
OTHERS = {"mount": 0x00020000, "network": 0x40000000, "ipc": 0x08000000, "hostname": 0x04000000, "pid": 0x20000000}
MS_REC_PRIVATE = 0x4000 | (1 << 18)


def unshare(libc: ctypes.CDLL, flag: int) -> str:
    """Call unshare; return an empty text, or the error."""
    return "" if libc.unshare(flag) == 0 else os.strerror(ctypes.get_errno())


def map_ids(uid: int, gid: int) -> str:
    """Become root of the new user namespace; return an empty text, or the error."""
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return f"{name}: {error.strerror}"
    return ""


def private_mount(libc: ctypes.CDLL) -> str:
    """Mount a small tmpfs over /tmp, visible only to this process."""
    for source, target, kind, flags in ((b"none", b"/", b"", MS_REC_PRIVATE), (b"tmpfs", b"/tmp", b"tmpfs", 0)):
        if libc.mount(source, target, kind or None, flags, None) != 0:
            return os.strerror(ctypes.get_errno())
    return ""


def first_process() -> str:
    """Check that a child is process 1 of the new pid namespace."""
    child = os.fork()
    if child == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    return "" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else "the child is not process 1"


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    faults = {"user": unshare(libc, USER)}
    if not faults["user"]:
        faults["user"] = map_ids(uid, gid)
        faults |= {name: unshare(libc, flag) for name, flag in OTHERS.items()}
        if not faults["mount"]:
            faults["mount"] = private_mount(libc)
        if not faults["pid"]:
            faults["pid"] = first_process()
    print("areal_like-doctor " + json.dumps({"faults": faults, "uid": uid}), flush=True)


main()
