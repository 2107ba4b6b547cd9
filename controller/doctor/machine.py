"""Interface of the checks to this machine, which tests can replace.

Reads system files, runs other programs with a deadline, and returns package versions, limits and the results of probes
(programs of this package that test something in a separate process).

A program that exceeds its deadline is killed with its children. If even that does not end it, it is ignored: a process
in a system call of a broken GPU driver cannot be killed, and the doctor must not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_like.guard import END, guarded

PROBES = Path(__file__).parent / "probes"
MARK = "areal_like-doctor "
"""Start of the line of a probe's output that contains its result; libraries may print other lines."""
KILL_WAIT_S = 1.0
MAX_OUTPUT_CHARS = 20_000


@dataclass(frozen=True)
class Ran:
    """Result of a program. `status` is None if it was killed at its deadline, or could not be started."""

    status: int | None
    out: str = ""
    err: str = ""
    fault: str = ""
    """Description of a failure; empty for status 0."""


@dataclass(frozen=True)
class Answer:
    """Result of a probe, or the reason of its failure."""

    data: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    point: str
    kind: str
    options: tuple[str, ...] = ()


class Machine:
    """This machine. Methods may be called from several threads; none raises an exception for missing files or
    packages.
    """

    def __init__(self, runs_dir: Path = Path("runs")) -> None:
        self.system = sys.platform
        self.environment: Mapping[str, str] = os.environ
        self.runs_dir = runs_dir
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}
        self._answers: dict[Any, Answer] = {}
        self._children: dict[subprocess.Popen[str], bool] = {}
        """Running programs -> whether they are guarded."""

    @property
    def is_linux(self) -> bool:
        """Whether this is Linux, the only system that supports all checks."""
        return self.system.startswith("linux")

    # ---------------------------------------------------------------- files and settings

    def text(self, path: str) -> str:
        """Text of a small file, without the final newline; empty if it cannot be read."""
        try:
            return Path(path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty if there is none."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def which(self, program: str) -> str:
        """Path of a program, or empty."""
        return shutil.which(program) or ""

    def version(self, package: str) -> str:
        """Version of a package in this environment, or empty. Imports nothing."""
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    def package_folder(self, package: str) -> str:
        """Folder of a top-level package that could be imported, or empty. Imports nothing."""
        spec = find_spec(package)
        return next(iter((spec and spec.submodule_search_locations) or []), "")

    def free_bytes(self, folder: Path) -> int:
        """Free space for this user on the file system of a folder. Raises OSError."""
        return shutil.disk_usage(folder).free

    def total_bytes(self, folder: Path) -> int:
        """Size of the file system of a folder. Raises OSError."""
        return shutil.disk_usage(folder).total

    def limit(self, name: str) -> tuple[float, float]:
        """Soft and hard resource limit (`RLIMIT_...`); infinity if unlimited."""
        import resource

        soft, hard = resource.getrlimit(getattr(resource, name))
        return tuple(float("inf") if value == resource.RLIM_INFINITY else float(value) for value in (soft, hard))  # type: ignore[return-value]

    def num_own_threads(self) -> int:
        """Number of threads of all processes of this user; 0 for the superuser, to whom no limit applies."""
        import psutil

        uid, total = os.getuid(), 0
        if uid == 0:
            return 0
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                total += process.num_threads() if process.uids().real == uid else 0
        return total

    def mounts(self) -> list[Mount]:
        """Every mounted file system."""
        import psutil

        return [
            Mount(part.mountpoint, part.fstype, tuple(part.opts.split(",")))
            for part in psutil.disk_partitions(all=True)
        ]

    def memory(self) -> Any:
        """psutil's virtual_memory(): `.total`, `.available`."""
        import psutil

        return psutil.virtual_memory()

    def swap(self) -> Any:
        """psutil's swap_memory(): `.total`, `.used`."""
        import psutil

        return psutil.swap_memory()

    def num_cores(self) -> tuple[int, int | None]:
        """Logical cores of the machine, and the number this process may use (None if unknown)."""
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        return os.cpu_count() or 1, affinity

    def load(self) -> float:
        """Load average of the last minute."""
        return os.getloadavg()[0]

    # ---------------------------------------------------------------- other programs

    def run(
        self, argv: Sequence[str], *, deadline_s: float, environment: Mapping[str, str] | None = None, stdin: str = "",
        is_guarded: bool = True,
    ) -> Ran:  # fmt: skip
        """Run a program in a new session and wait for it, at most `deadline_s`.

        `is_guarded`: it is killed when this process exits for any reason; not used when its start time is measured.
        """
        if shutil.which(argv[0]) is None:
            return Ran(None, fault="cannot be started (No such file or directory)")
        try:
            child = subprocess.Popen(
                guarded(argv) if is_guarded else list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
                env=dict(environment or self.environment),
            )  # fmt: skip
        except OSError as error:
            return Ran(None, fault=f"cannot be started ({error.strerror or error})")
        with self._lock:
            self._children[child] = is_guarded
        try:
            out, err = child.communicate(stdin, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            _kill(child, is_guarded)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=KILL_WAIT_S)
            return Ran(None, fault=f"no result within {deadline_s:g} s")
        finally:
            with self._lock:
                self._children.pop(child, None)
        return Ran(child.returncode, out[-MAX_OUTPUT_CHARS:], err[-MAX_OUTPUT_CHARS:], _fault(child.returncode, err))

    def probe(self, name: str, *arguments: str, deadline_s: float = 30.0, python: str = "") -> Answer:
        """Run probes/<name>.py in a separate process, once; later calls return the same result."""
        key = (name, arguments, python)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._answers:
                argv = [python or sys.executable, "-P", str(PROBES / f"{name}.py"), *arguments]
                self._answers[key] = _answer(self.run(argv, deadline_s=deadline_s))
            return self._answers[key]

    def end(self) -> None:
        """Kill all programs that checks left running."""
        with self._lock:
            children = list(self._children.items())
        for child, is_guarded in children:
            _kill(child, is_guarded)


def _kill(child: subprocess.Popen[str], is_guarded: bool) -> None:
    """Kill a program. A guard kills all its descendants, also in other sessions; this function does not wait for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if is_guarded:
            child.send_signal(END)
        else:
            os.killpg(child.pid, signal.SIGKILL)


def _fault(status: int, err: str) -> str:
    """Description of a failure: its last line of output, or the signal that ended it."""
    if status == 0:
        return ""
    if status < 0:
        try:
            return f"ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"ended by signal {-status}"
    last = (err.strip().splitlines() or [""])[-1].strip()
    return last[-300:] or f"ended with status {status}"


def _answer(ran: Ran) -> Answer:
    for line in reversed(ran.out.splitlines()):
        if line.startswith(MARK):
            try:
                return Answer(json.loads(line.removeprefix(MARK)), ran.fault)
            except ValueError:
                break
    return Answer({}, ran.fault or "printed nothing")
