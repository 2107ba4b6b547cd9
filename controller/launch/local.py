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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from areal_like.errors import DeadlineExceeded

TAIL_BYTES = 64_000
"""How much of a log's end is looked at for its tail."""


@dataclass
class Child:
    """One running process and where its output goes."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    started_s: float
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
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(installation), *inherited, str(user_path)]))
    environment["PYTHONUNBUFFERED"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        environment[key] = str(num_threads)
    return environment


def describe_status(returncode: int) -> str:
    """A return code in words: `status 2`, or the signal that ended it."""
    if returncode >= 0:
        return f"status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


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
        """Start `python <argv>`; its output is appended to logs/<name>.log. Returns the process id."""
        assert name not in self._children, f"{name} runs already"
        log_path = self.log_of(name)
        log: IO[bytes] = log_path.open("ab")
        try:
            process = await asyncio.create_subprocess_exec(
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
        self._children[name] = Child(name, process, log_path, time.monotonic())
        return process.pid

    def reap(self) -> list[Exit]:
        """Processes that have ended since the last call; they are forgotten here."""
        ended = []
        for name, child in list(self._children.items()):
            if child.process.returncode is not None:
                del self._children[name]
                ended.append(Exit(name, child.process.pid, child.process.returncode, child.is_stopping))
        return ended

    async def wait(self, name: str, deadline_s: float, owner: str) -> int:
        """Wait for one process to end and return its status. Raises DeadlineExceeded."""
        child = self._children[name]
        try:
            async with asyncio.timeout(deadline_s):
                await child.process.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"process {name} to end", owner, deadline_s) from None
        assert child.process.returncode is not None
        self._children.pop(name, None)
        return child.process.returncode

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
        with contextlib.suppress(ProcessLookupError):
            if whole_session:
                os.killpg(child.process.pid, number)
            else:
                child.process.send_signal(number)

    async def stop_all(self, grace_s: float) -> list[str]:
        """SIGTERM to all, then SIGKILL to those that live past `grace_s`. Returns the names that had to be killed."""
        for name in self.names:
            self.terminate(name)
        await self._wait_all(grace_s)
        stubborn = [name for name, child in self._children.items() if child.process.returncode is None]
        for name in stubborn:
            self.kill(name)
        await self._wait_all(5.0)
        self.reap()
        return stubborn

    async def _wait_all(self, timeout_s: float) -> None:
        waits = [asyncio.create_task(child.process.wait()) for child in self._children.values()]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=timeout_s)
            for task in pending:
                task.cancel()
