"""The system call filter of a program, as BPF of the kernel, generated in pure Python.

It is installed by bubblewrap or by inside_confine.

It is an allow-list. Other calls fail with an error, as in a kernel without them; a call of another architecture kills
the process. There are two strengths: within namespaces a program may create processes and files there; without
namespaces it may do neither, and may send signals only to itself.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

from services.reward.sandbox.syscall_numbers import CHECKED, FILES, LAST_KNOWN, PROCESSES, READING

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine: column of the number tables, and the kernel's name for it (AUDIT_ARCH_*)."""
OWN_PID = 0x5EC0_09D1
"""Placeholder for the process id of the program, which is replaced when the filter is installed."""

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_X32_BIT = 0x4000_0000

_NEW_NAMESPACES = 0x7E02_0000
_CLONE_THREAD = 0x0001_0000
_WRITING = 0x3 | 0x40 | 0x200 | 0x40_0000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE"""
_AF_UNIX = 1
_PRCTLS = (3, 15, 16, 23, 39)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS"""
_IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX"""

Instruction = tuple[int, int, int, int]


def machine() -> str:
    """This machine's architecture, as in ARCHITECTURES; empty for one without a table."""
    name = platform.machine()
    return name if name in ARCHITECTURES else ""


def number_of(call: str) -> int:
    """The number of a checked call on this machine. Raises KeyError for an architecture without a table."""
    number = CHECKED[call][ARCHITECTURES[machine()][0]]
    assert number is not None, "every machine of the tables has this call"
    return number


def make_filter(machine: str, *, in_namespaces: bool) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises KeyError for an architecture without a table."""
    column, architecture = ARCHITECTURES[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    checks = _checks(in_namespaces)
    for name, check in checks.items():
        number = CHECKED[name][column]
        if number is not None:
            code += [(_JUMP_IF_EQUAL, 0, len(check), number), *check]
    tables = (READING, FILES, PROCESSES) if in_namespaces else (READING,)
    numbers = {row[column] for table in tables for name, row in table.items() if name not in checks}
    for first, last in _ranges(number for number in numbers if number is not None):
        code += [(_JUMP_IF_AT_LEAST, 0, 2, first), (_JUMP_IF_AT_LEAST, 1, 0, last + 1), (_RETURN, 0, 0, _ALLOW)]
    code += [
        (_JUMP_IF_AT_LEAST, 0, 1, LAST_KNOWN + 1),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, last)."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def _argument(index: int) -> Instruction:
    """Instruction that loads the low half of an argument."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _one_of(index: int, allowed: tuple[int, ...], error: int) -> list[Instruction]:
    tests: list[Instruction] = [(_JUMP_IF_EQUAL, len(allowed) - place, 0, value) for place, value in enumerate(allowed)]
    return [_argument(index), *tests, (_RETURN, 0, 0, _ERROR | error), (_RETURN, 0, 0, _ALLOW)]


def _without_bits(index: int, bits: int, error: int) -> list[Instruction]:
    masked: list[Instruction] = [_argument(index), (_AND, 0, 0, bits), (_JUMP_IF_EQUAL, 1, 0, 0)]
    return [*masked, (_RETURN, 0, 0, _ERROR | error), (_RETURN, 0, 0, _ALLOW)]


def _checks(in_namespaces: bool) -> dict[str, list[Instruction]]:
    """Instructions per checked call; each list ends every way with a return."""
    refused: list[Instruction] = [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    checks = {
        "clone3": refused,
        "ioctl": _one_of(1, _IOCTLS, errno.ENOTTY),
        "personality": _one_of(0, (0xFFFF_FFFF,), errno.EPERM),
        "prctl": _one_of(0, _PRCTLS, errno.EPERM),
        "prlimit64": _one_of(0, (0,), errno.EPERM),
    }
    if in_namespaces:
        checks["clone"] = _without_bits(0, _NEW_NAMESPACES, errno.EPERM)
        checks["socket"] = _one_of(0, (_AF_UNIX,), errno.EAFNOSUPPORT)
        return checks
    is_thread: list[Instruction] = [
        _argument(0),
        (_AND, 0, 0, _CLONE_THREAD | _NEW_NAMESPACES),
        (_JUMP_IF_EQUAL, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EAGAIN),
    ]
    checks["clone"] = is_thread
    checks["open"] = _without_bits(1, _WRITING, errno.EROFS)
    checks["openat"] = _without_bits(2, _WRITING, errno.EROFS)
    checks["kill"] = _one_of(0, (OWN_PID,), errno.EPERM)
    checks["tgkill"] = _one_of(0, (OWN_PID,), errno.EPERM)
    return checks
