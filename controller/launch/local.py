"""Starts, watches and ends the processes of a run on this machine.

Owns: how a process is spawned here, its log file, its end. Refuses: what a process is for, restart policy
(supervision.py).
Children get a session of their own, so that Ctrl-C in the terminal reaches the controller alone, and they die with it:
each asks the kernel for that at start (areal_like.process.die_with_parent). A cluster launcher differs in `start` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from areal_like.errors import OperationError
from areal_like.shadow import USER_PATH

TAIL_BYTES = 64_000
"""How much of a log's end is looked at for its tail."""
KILL_WAIT_S = 5.0
"""A killed process is gone by then, unless the kernel holds it."""
WAIT_SLICE_S = 0.1
"""How long a second signal may go unnoticed while processes are awaited."""


@dataclass
class Child:
    """One running process."""

    name: str
    process: asyncio.subprocess.Process
    is_stopping: bool = False
    """We asked it to end; its exit is no surprise."""


@dataclass(frozen=True)
class Exit:
    """A process that ended since the last look."""

    name: str
    pid: int
    returncode: int
    expected: bool


def tail_of(log_path: Path, num_lines: int = 15) -> str:
    """The last lines of a log file, as text; empty when there is none."""
    try:
        with log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


def child_environment(num_threads: int, *, user_path: Path) -> dict[str, str]:
    """Environment of a child: our installation first on its path, the user's folder last, and one thread budget."""
    import areal_like

    installation = Path(areal_like.__file__).resolve().parent.parent
    environment = dict(os.environ)
    inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(installation), *inherited]))
    environment[USER_PATH] = str(user_path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        environment[key] = str(num_threads)
    # Threads that wait for a sibling must not spin for long: with one busy neighbour on two cores a step took 25 times
    # as long with the default, and no longer than usual with this.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    return environment


class LocalLauncher:
    """Processes of one run on this machine, by name. Must be used from the main thread's event loop.

    (The kernel's parent-death signal is bound to the thread that forked.)
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: dict[str, Child] = {}

    @property
    def names(self) -> list[str]:
        """Processes believed to run."""
        return list(self._children)

    def pid_of(self, name: str) -> int | None:
        """Process id, or None when no such process runs."""
        child = self._children.get(name)
        return child.process.pid if child else None

    def log_of(self, name: str) -> Path:
        """Where the process writes stdout and stderr."""
        return self._log_dir / f"{name}.log"

    async def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start `python <argv>`; its output is appended to logs/<name>.log. Returns the process id.

        Raises OperationError when the machine refuses (no room for a log, no more processes).
        """
        assert name not in self._children, f"{name} runs already"
        try:
            process = await self._spawn(self.log_of(name), argv, environment)
        except OSError as error:
            raise OperationError(f"cannot start {name}: {error}") from error
        self._children[name] = Child(name, process)
        return process.pid

    @staticmethod
    async def _spawn(log_path: Path, argv: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        log: IO[bytes] = log_path.open("ab")
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # never the current folder first: a user's trainer.py must not become our trainer
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            log.close()

    def is_running(self, name: str) -> bool:
        """The process lives."""
        child = self._children.get(name)
        return child is not None and child.process.returncode is None

    def reap(self) -> list[Exit]:
        """Processes that have ended since the last call; they are forgotten here, and what they started is killed."""
        ended = []
        for name, child in list(self._children.items()):
            if child.process.returncode is not None:
                del self._children[name]
                _kill_session(child.process.pid)
                ended.append(Exit(name, child.process.pid, child.process.returncode, child.is_stopping))
        return ended

    def expect_end(self, name: str) -> None:
        """The process was told to end by message; its exit is no surprise."""
        if child := self._children.get(name):
            child.is_stopping = True

    def terminate(self, name: str) -> None:
        """SIGTERM: end in good order."""
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """SIGKILL to the process and all of its session."""
        self._signal(name, signal.SIGKILL, whole_session=True)

    def _signal(self, name: str, number: signal.Signals, *, whole_session: bool = False) -> None:
        child = self._children.get(name)
        if child is None or child.process.returncode is not None:
            return
        child.is_stopping = True
        if whole_session:
            _kill_session(child.process.pid)
            return
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)

    async def stop_all(self, grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> list[str]:
        """SIGTERM to all, then SIGKILL to those that live past `grace_s`. Returns the names that had to be killed.

        is_hurried: asked again and again; once it says so the grace is over.
        """
        for name in self.names:
            self.terminate(name)
        deadline_s = time.monotonic() + grace_s
        while not is_hurried() and (left_s := deadline_s - time.monotonic()) > 0 and self._living():
            await self._wait_all(min(left_s, WAIT_SLICE_S))
        stubborn = self._living()
        for name in stubborn:
            self.kill(name)
        await self._wait_all(KILL_WAIT_S)
        self.reap()
        return stubborn

    def _living(self) -> list[str]:
        return [name for name in self._children if self.is_running(name)]

    async def _wait_all(self, timeout_s: float) -> None:
        waits = [asyncio.create_task(child.process.wait()) for child in self._children.values()]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for task in pending:
                task.cancel()


def _kill_session(pid: int) -> None:
    """SIGKILL to a child of ours, if it lives, and to whatever it started in its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
