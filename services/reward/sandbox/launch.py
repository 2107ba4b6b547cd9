"""How the first process of a sandbox is started, layer by layer.

Owns: bubblewrap's command line, the environment and limits of what is started, the code it runs. Refuses: choosing a
layer (layers), talking to it (cell).
"""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

from services.reward.sandbox import seccomp
from services.reward.sandbox.interpreter import FLAGS, Interpreter, NoInterpreter
from services.reward.sandbox.limits import Limits

CODE_PARTS = ("inside_writing.py", "inside_answering.py", "inside.py")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
INSIDE_UID = 65534
STACK_ROOM_BYTES = 512 << 20
"""Address space beyond the memory limit: stacks and arenas are reserved long before they are used."""
_BOOT = "import os,marshal\nfor part in marshal.loads(os.pread({fd},1<<24,0)): exec(part)"
_COMPILE = """
import sys, json, marshal
parts = [compile(text, name, "exec", 0, True) for name, text in json.load(sys.stdin)]
sys.stdout.buffer.write(marshal.dumps(parts))
"""


@dataclass(frozen=True)
class Setup:
    """One way to run programs. layer: see layers; uid: the user to become first, None to stay who we are.

    staged: other places of the interpreter's folders, for a user that cannot reach them (staging).
    """

    layer: str
    interpreter: Interpreter
    uid: int | None = None
    bubblewrap: str = ""
    landlock: int = 0
    staged: dict[str, str] = field(default_factory=dict)

    def command(self, limits: Limits, code_fd: int, control_fd: int, filter_fd: int) -> list[str]:
        """What to start; the descriptors are inherited. filter_fd: -1 without a filter from outside."""
        python = [self.interpreter.executable, *FLAGS, "-c", _BOOT.format(fd=code_fd), str(control_fd)]
        return [*self._bubblewrap(limits, filter_fd), "--", *python] if self.layer == "namespaces" else python

    def _bubblewrap(self, limits: Limits, filter_fd: int) -> list[str]:
        tmp = str(limits.tmp_bytes)
        command = [self.bubblewrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        command += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try", "--die-with-parent"]
        command += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        command += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
        for path in self.interpreter.shown:
            command += ["--ro-bind", self.staged.get(path, path), path]
        for path in self.interpreter.hidden:
            command += ["--tmpfs", path, "--remount-ro", path]
        command += ["--size", tmp, "--tmpfs", "/tmp", "--size", "65536", "--tmpfs", "/dev"]
        for device in ("null", "zero", "random", "urandom"):
            command += ["--dev-bind-try", f"/dev/{device}", f"/dev/{device}"]
        command += ["--symlink", "/tmp/.stdin", "/dev/stdin", "--dir", "/dev/shm", "--size", tmp, "--tmpfs", "/dev/shm"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        return [*command, "--seccomp", str(filter_fd)] if filter_fd >= 0 else command

    @property
    def has_filter(self) -> bool:
        """A seccomp filter is part of this layer here."""
        return self.layer != "limits" and bool(seccomp.machine())

    def outer_filter(self) -> bytes:
        """The filter that bubblewrap is to install; empty where there is none, or the inside installs it."""
        if self.layer != "namespaces" or not self.has_filter:
            return b""
        return seccomp.make_filter(seccomp.machine(), in_namespaces=True)

    def settings(self, limits: Limits) -> dict[str, Any]:
        """What the first process is told."""
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
                rlimits["RLIMIT_NPROC"] = limits.max_tasks + 1  # else it would count all processes of our user
        confinement: dict[str, Any] = {}
        if self.layer in ("landlock", "seccomp"):
            confinement = {
                "code": _part("inside_confine.py"),
                "system_calls": seccomp.make_filter(seccomp.machine(), in_namespaces=False),
                "own_pid_mark": seccomp.OWN_PID,
                "readable": [self.staged.get(path, path) for path in self.interpreter.shown],
                "landlock": self.landlock if self.layer == "landlock" else 0,
            }
        return {"limits": rlimits, "packages": list(self.interpreter.packages), "confinement": confinement}


def _kernel() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _part(name: str) -> str:
    return (importlib.resources.files("services.reward.sandbox") / name).read_text(encoding="utf-8")


def compile_inside(interpreter: Interpreter) -> bytes:
    """The code of the inside, compiled by the Python that will run it. Raises NoInterpreter."""
    parts = json.dumps([(name, _part(name)) for name in CODE_PARTS])
    command = [interpreter.executable, *FLAGS, "-c", _COMPILE]
    try:
        done = subprocess.run(command, input=parts.encode(), capture_output=True, timeout=60, check=True, env={})
    except (OSError, subprocess.SubprocessError) as error:
        raise NoInterpreter(f"{interpreter.executable} cannot compile our code ({error})") from error
    return done.stdout


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
