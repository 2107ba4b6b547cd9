"""The command lines, environment and limits with which the first process of a sandbox is started, for each layer.

The choice of a layer is in layers.py, communication in cell.py.
"""

from __future__ import annotations

import importlib.resources
import json
import marshal
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

from areal_like.guard import tied
from services.reward.sandbox import seccomp
from services.reward.sandbox.interpreter import FLAGS, Interpreter, NoInterpreter
from services.reward.sandbox.limits import Limits

CODE_PARTS = ("inside_writing.py", "inside_answering.py", "inside_namespaces.py", "inside.py")
TESTS_MODULES = (
    "services", "services.reward", "services.reward.sandbox", "services.reward.sandbox.inside_answering",
    "services.reward.judging", "services.reward.judging.problem", "services.reward.judging.plain",
    "services.reward.judging.program", "services.reward.judging.remote", "services.reward.judging.names",
    "services.reward.judging.rewriting", "services.reward.judging.assertions", "services.reward.judging.tests_process",
)  # fmt: skip
"""Modules of this project that a process of tests runs, in order of their imports."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
INSIDE_UID = 65534
STACK_ROOM_BYTES = 512 << 20
"""Address space in addition to the memory limit, because stacks and arenas are reserved before they are used."""
_BOOT = """
import os,marshal,sys
for name, part in marshal.loads(os.pread({fd},1<<24,0)):
    space = globals()
    if name:
        module = sys.modules[name] = type(sys)(name)
        module.__path__, space = [], module.__dict__
    exec(part, space)
"""
_COMPILE = """
import sys, json, marshal
parts = [(name, compile(text, file, "exec", 0, True)) for name, file, text in json.load(sys.stdin)]
sys.stdout.buffer.write(marshal.dumps(parts))
"""


@dataclass(frozen=True)
class Setup:
    """One way to run programs. layer: see layers.py; uid: the user to switch to, None for the current one.

    staged: alternative paths of the interpreter's folders, for a user that cannot reach them (staging.py). is_fresh:
    every run gets separate namespaces within those of the sandbox (layer `namespaces` only; inside_namespaces).
    """

    layer: str
    interpreter: Interpreter
    uid: int | None = None
    bubblewrap: str = ""
    landlock: int = 0
    staged: dict[str, str] = field(default_factory=dict)
    is_fresh: bool = False
    is_read_only: bool = False
    """No folder can be written, not even /tmp and /dev/shm."""

    def command(self, limits: Limits, code_fd: int, control_fd: int, filter_fd: int) -> list[str]:
        """The command line; the descriptors are inherited. filter_fd: -1 without an outer filter."""
        python = [self.interpreter.executable, *FLAGS, "-c", _BOOT.format(fd=code_fd), str(control_fd)]
        return [*self._bubblewrap(limits, filter_fd), "--", *python] if self.layer == "namespaces" else python

    def _bubblewrap(self, limits: Limits, filter_fd: int) -> list[str]:
        tmp = str(limits.tmp_bytes)
        command = [self.bubblewrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        command += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try", "--die-with-parent"]
        command += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        command += ["--cap-add", "CAP_SYS_ADMIN"] if self.is_fresh else []
        command += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
        for path in self.interpreter.shown:
            command += ["--ro-bind", self.staged.get(path, path), path]
        for path in self.interpreter.hidden:
            command += ["--tmpfs", path, "--remount-ro", path]
        command += ["--size", tmp, "--tmpfs", "/tmp", *(["--remount-ro", "/tmp"] if self.is_read_only else [])]
        command += ["--size", "65536", "--tmpfs", "/dev"]
        for device in ("null", "zero", "random", "urandom"):
            command += ["--dev-bind-try", f"/dev/{device}", f"/dev/{device}"]
        command += ["--symlink", "/tmp/.stdin", "/dev/stdin", "--dir", "/dev/shm"]
        command += [] if self.is_read_only else ["--size", tmp, "--tmpfs", "/dev/shm"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        return [*command, "--seccomp", str(filter_fd)] if filter_fd >= 0 else command

    @property
    def has_filter(self) -> bool:
        """Whether a seccomp filter is part of this layer here."""
        return self.layer != "limits" and bool(seccomp.machine())

    def outer_filter(self) -> bytes:
        """The filter that bubblewrap installs; empty if there is none, or if the inside installs it."""
        if self.layer != "namespaces" or self.is_fresh or not self.has_filter:
            return b""
        return seccomp.make_filter(seccomp.machine(), in_namespaces=True)

    def settings(self, limits: Limits) -> dict[str, Any]:
        """The settings that are passed to the first process."""
        rlimits = {
            "RLIMIT_CPU": math.ceil(limits.time_s) + 1,
            "RLIMIT_AS": limits.memory_bytes + STACK_ROOM_BYTES,
            "RLIMIT_FSIZE": limits.max_file_bytes,
            "RLIMIT_NOFILE": limits.max_open_files,
            "RLIMIT_CORE": 0,
        }
        if platform.system() == "Linux":
            rlimits |= {"RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": 256}
            if self.uid is not None or (self.layer == "namespaces" and _kernel() >= (5, 14) and os.getuid() != 0):
                rlimits["RLIMIT_NPROC"] = limits.max_tasks + 2  # otherwise it would count all processes of this user
        confinement: dict[str, Any] = {}
        if self.layer in ("landlock", "seccomp") or self.is_fresh:
            confinement = {
                "code": _part("inside_confine.py"),
                "system_calls": seccomp.make_filter(seccomp.machine(), in_namespaces=self.is_fresh),
                "own_pid_mark": seccomp.OWN_PID,
                "readable": [self.staged.get(path, path) for path in self.interpreter.shown],
                "landlock": self.landlock if self.layer == "landlock" else 0,
            }
        return {
            "limits": rlimits,
            "packages": list(self.interpreter.packages),
            "confinement": confinement,
            "parent": os.getpid() if platform.system() == "Linux" and self.layer != "namespaces" else 0,
            "fresh": {"clone_call": seccomp.number_of("clone"), "tmp_bytes": limits.tmp_bytes} if self.is_fresh else {},
        }


def _kernel() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _part(name: str) -> str:
    return (importlib.resources.files("services.reward.sandbox") / name).read_text(encoding="utf-8")


def compile_inside(interpreter: Interpreter, *, with_tests: bool = False) -> bytes:
    """Compile the code of the inside with the Python that will run it. `with_tests`: for a process of tests.

    Raises NoInterpreter.
    """
    parts = [(name, name, _module_source(name)) for name in TESTS_MODULES] if with_tests else []
    parts += [("", name, _part(name)) for name in CODE_PARTS]
    if interpreter.version == sys.version_info[:3] and interpreter.implementation == sys.implementation.name:
        return marshal.dumps([(name, compile(text, file, "exec", 0, True)) for name, file, text in parts])
    command = [interpreter.executable, *FLAGS, "-c", _COMPILE]
    try:
        done = subprocess.run(
            tied(command), input=json.dumps(parts).encode(), capture_output=True, timeout=120, check=True, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoInterpreter(f"{interpreter.executable} cannot compile the sandbox's code ({error})") from error
    return done.stdout


def _module_source(name: str) -> str:
    """The source of a module of this project; empty for a package."""
    package, _, module = name.rpartition(".")
    file = importlib.resources.files(package) / f"{module}.py" if package else None
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""


def file_of(content: bytes) -> int:
    """A descriptor of an unnamed file with this content, read from its start."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("content")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
