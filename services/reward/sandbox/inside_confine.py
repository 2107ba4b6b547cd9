"""The inside of a sandbox without namespaces: a process gives up all privileges that it can before its program runs.

It drops capabilities, and installs Landlock (files to read; none to write) and the seccomp filter. layers.py decides
which of them are used. It is passed as code like the other `inside_*`; each step raises OSError if it fails.
"""

from __future__ import annotations

import ctypes
import os
import struct

_NO_NEW_PRIVS, _SET_SECCOMP, _CAPBSET_DROP = 38, 22, 24
_FILTER_MODE = 2
_CAPABILITY_VERSION = 0x2008_0522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 | 4 | 8
"""Rights: execute, read a file, read a folder."""
_FILE_RIGHTS = 1 | 2 | 4
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights by Landlock version; later versions as the last."""
_PATH_BENEATH = 1
INSTRUCTION = struct.Struct("<HBBI")


def confine(system_calls: bytes, own_pid_mark: int, readable: list[str], landlock: int) -> None:
    """Confine this process. `landlock`: version of Landlock in the kernel, 0 for none. `readable` is used with Landlock
    only."""
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _drop_capabilities(libc)
    if landlock:
        _hide_files(libc, readable, landlock)
    _filter_calls(libc, system_calls, own_pid_mark)


def _must(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    number = 0
    while libc.prctl(_CAPBSET_DROP, number, 0, 0, 0) == 0:  # fails if there is nothing to drop, or after the last one
        number += 1
    header = ctypes.create_string_buffer(struct.pack("<Ii", _CAPABILITY_VERSION, 0))
    _must(libc.capset(header, ctypes.create_string_buffer(bytes(24))))


def _hide_files(libc: ctypes.CDLL, readable: list[str], version: int) -> None:
    all_rights = (1 << _FS_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("<Q", all_rights)
    if version >= 4:
        attributes += struct.pack("<Q", 0b11)  # no TCP
    if version >= 6:
        attributes += struct.pack("<Q", 0b11)  # no abstract sockets and no signals to processes outside
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _must(libc.syscall(_CREATE_RULESET, buffer, len(attributes), 0))
    for path in [*readable, "/dev/null", "/dev/zero", "/dev/urandom"]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = _READ if os.path.isdir(path) else _READ & _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("<Qi", rights, fd), 12)
        _must(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(fd)
    _must(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _filter_calls(libc: ctypes.CDLL, system_calls: bytes, own_pid_mark: int) -> None:
    own = [
        INSTRUCTION.pack(code, jump_true, jump_false, os.getpid() if value == own_pid_mark else value)
        for code, jump_true, jump_false, value in INSTRUCTION.iter_unpack(system_calls)
    ]
    filters = ctypes.create_string_buffer(b"".join(own), len(system_calls))
    program = struct.pack("@HP", len(own), ctypes.addressof(filters))
    _must(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(program, len(program)), 0, 0))
