"""Prints whether a seccomp filter can be installed and is enforced. It applies only to this process.

The filter answers an unused system call number with "not permitted"; without the filter the kernel answers "unknown".
"""

from __future__ import annotations

import ctypes
import errno
import json
import os

NO_SUCH_CALL = 0xFFFF
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2


class Instruction(ctypes.Structure):
    """struct sock_filter"""

    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]


def install(libc: ctypes.CDLL) -> str:
    """Install the filter; return an empty text, or the error."""
    instructions = (Instruction * 4)(
        Instruction(0x20, 0, 0, 0),  # load the number of the system call
        Instruction(0x15, 0, 1, NO_SUCH_CALL),  # is it the filtered number?
        Instruction(0x06, 0, 0, 0x00050000 | errno.EPERM),  # yes: an error
        Instruction(0x06, 0, 0, 0x7FFF0000),  # no: allow
    )
    program = Program(4, instructions)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        return os.strerror(ctypes.get_errno())
    libc.syscall(NO_SUCH_CALL)
    return "" if ctypes.get_errno() == errno.EPERM else "the filter is installed but not enforced"


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    print("areal_like-doctor " + json.dumps({"fault": install(libc)}), flush=True)


main()
