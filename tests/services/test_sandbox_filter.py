"""The seccomp filter, run by a small emulator of the kernel's BPF, for both architectures."""

from __future__ import annotations

import errno
import struct

import pytest

from services.reward.sandbox import seccomp
from services.reward.sandbox.syscall_numbers import CHECKED, FILES, PROCESSES, READING

ALLOW, KILL = 0x7FFF0000, 0x80000000
MACHINES = [*seccomp.ARCHITECTURES]
PID = 4711


def run(program: bytes, number: int, arguments: tuple[int, ...], architecture: int) -> int:
    """What the kernel would answer: the value of the return instruction reached."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *[0] * (6 - len(arguments))))
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, place = 0, 0
    while True:
        operation, if_true, if_false, value = code[place]
        if value == seccomp.OWN_PID:
            value = PID
        place += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x15:
            place += if_true if accumulator == value else if_false
        elif operation == 0x35:
            place += if_true if accumulator >= value else if_false
        else:
            assert operation == 0x06
            return value


class Filter:
    def __init__(self, machine: str, *, in_namespaces: bool) -> None:
        self.column, self.architecture = seccomp.ARCHITECTURES[machine]
        self.program = seccomp.make_filter(machine, in_namespaces=in_namespaces)

    def says(self, name: str, *arguments: int) -> str:
        tables = READING | FILES | PROCESSES | CHECKED
        number = tables[name][self.column]
        if number is None:
            return "not here"
        answer = run(self.program, number, arguments, self.architecture)
        return "allowed" if answer == ALLOW else errno.errorcode[answer & 0xFFFF]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_another_architecture_ends_the_process_and_the_x32_calls_do_not_exist(machine: str) -> None:
    program = seccomp.make_filter(machine, in_namespaces=True)
    assert run(program, 0, (), 0x40000003) == KILL
    assert run(program, 0x40000000, (), seccomp.ARCHITECTURES[machine][1]) & 0xFFFF == errno.ENOSYS


def test_what_is_on_no_list_is_refused(machine: str) -> None:
    _, architecture = seccomp.ARCHITECTURES[machine]
    forbidden = {
        "x86_64": {"ptrace": 101, "mount": 165, "unshare": 272, "keyctl": 250, "bpf": 321, "io_uring_setup": 425},
        "aarch64": {"ptrace": 117, "mount": 40, "unshare": 97, "keyctl": 219, "bpf": 280, "io_uring_setup": 425},
    }[machine]
    for in_namespaces in (True, False):
        program = seccomp.make_filter(machine, in_namespaces=in_namespaces)
        for number in forbidden.values():
            assert run(program, number, (), architecture) & 0xFFFF == errno.EPERM
        assert run(program, 460, (), architecture) & 0xFFFF == errno.ENOSYS


def test_every_reading_call_is_allowed_in_both_strengths(machine: str) -> None:
    for in_namespaces in (True, False):
        calls = Filter(machine, in_namespaces=in_namespaces)
        assert {calls.says(name) for name in READING} <= {"allowed", "not here"}


def test_new_namespaces_are_refused_and_threads_and_forks_are_not(machine: str) -> None:
    calls = Filter(machine, in_namespaces=True)
    assert calls.says("clone", 0x003D0F00) == "allowed"  # a thread
    assert calls.says("clone", 17) == "allowed"  # a fork
    for flag in (0x10000000, 0x20000000, 0x40000000, 0x20000, 0x2000000, 0x8000000, 0x4000000):
        assert calls.says("clone", flag | 17) == "EPERM"
    assert calls.says("clone3") == "ENOSYS", "its flags are in memory, where no filter looks"


def test_without_namespaces_there_are_threads_but_no_processes_no_writing_and_no_signals(
    machine: str,
) -> None:
    calls = Filter(machine, in_namespaces=False)
    assert calls.says("clone", 0x003D0F00) == "allowed"
    assert calls.says("clone", 17) == "EAGAIN"
    assert calls.says("clone", 0x10000000 | 0x10000) == "EAGAIN"
    assert {calls.says(name) for name in ("fork", "vfork", "execve")} <= {"EPERM", "not here"}
    assert calls.says("openat", 0, 0, 0x80000) == "allowed"
    for flags in (1, 2, 0x40, 0x200, 0x410000):
        assert calls.says("openat", 0, 0, flags) == "EROFS"
    assert {calls.says(name) for name in FILES if name not in ("open", "openat")} <= {"EPERM", "not here"}
    assert calls.says("kill", PID) == "allowed"
    assert calls.says("kill", 1) == calls.says("tgkill", 1) == "EPERM"
    assert calls.says("kill", 0xFFFFFFFF) == "EPERM", "-1 is everybody"
    assert calls.says("socket", 1) == calls.says("connect") == "EPERM"


def test_sockets_limits_and_controls_are_checked_by_their_arguments(machine: str) -> None:
    calls = Filter(machine, in_namespaces=True)
    assert calls.says("socket", 1) == "allowed"
    assert calls.says("socket", 2) == calls.says("socket", 10) == calls.says("socket", 16) == "EAFNOSUPPORT"
    assert calls.says("prlimit64", 0) == "allowed"
    assert calls.says("prlimit64", 1) == "EPERM"
    assert calls.says("ioctl", 0, 0x5412) == "ENOTTY", "TIOCSTI types into a terminal"
    assert calls.says("ioctl", 0, 0x5401) == "allowed"
    assert calls.says("prctl", 15) == "allowed"
    assert calls.says("prctl", 4) == calls.says("prctl", 22) == "EPERM"
    assert calls.says("personality", 0xFFFFFFFF) == "allowed"
    assert calls.says("personality", 0x40000) == "EPERM"
