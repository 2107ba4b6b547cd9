"""Processes of a run by name, wherever they are: who runs, who has ended, whose end was expected.

Owns: names, logs' places, the order in which all are stopped. Refuses: how a process is spawned (local.py on this
machine, cluster/launcher.py on a Ray cluster: they differ in that alone), what a process is for, restart policy
(supervisor.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_like.errors import OperationError
from controller.launch import processor
from controller.launch.pids import LocalPid

CONTROLLER = "controller"
"""Our own name alongside those of the processes."""
TAIL_BYTES = 64_000
"""How much of a log's end is looked at for its tail."""
KILL_WAIT_S = 5.0
"""A killed process is gone by then, unless the kernel holds it."""
WAIT_SLICE_S = 0.1
"""How long a second signal may go unnoticed while processes are awaited."""

Say = Callable[[str], None]


class Spawned(Protocol):
    """One process that was started, on this machine or another."""

    @property
    def pid(self) -> int:
        """Its id on its own machine; 0 while that is not known yet."""

    @property
    def returncode(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""

    @property
    def cpu_s(self) -> float | None:
        """Processor time it has spent, and what it started; None when that cannot be known."""

    @property
    def rss_mb(self) -> float | None:
        """Resident memory in MiB, without its children; None when that cannot be known."""

    @property
    def awaited(self) -> str:
        """What it waits for before it can be started at all, in words; empty: nothing any more."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL to it and to whatever it started."""

    async def wait(self) -> None:
        """Until it has ended."""


@dataclass
class Child:
    """One process by its name."""

    name: str
    process: Spawned
    is_stopping: bool = False
    """We asked it to end; its exit is no surprise."""


@dataclass(frozen=True)
class Exit:
    """A process that ended since the last look."""

    name: str
    pid: int
    returncode: int
    expected: bool


def tail_of(log_path: Path, num_lines: int = 15, *, start: int = 0) -> str:
    """The last lines of a log file from byte `start` on, as text; empty when there is none."""
    try:
        with log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


class Launcher(ABC):
    """Processes of one run, by name. `open` before the first start, `close` when all are stopped."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self.user_path = Path.cwd()
        """Where the user's own modules are looked for, as it was called when we started: a job's may be made again."""
        self._children: dict[str, Child] = {}

    # ------------------------------------------------------------ what differs

    @property
    @abstractmethod
    def host(self) -> str:
        """Address the controller binds and the processes reach it by. Known once open."""

    @abstractmethod
    async def open(self, say: Say) -> bool:
        """Get what processes need to be started; True once it is there.

        Raises UserError, OperationError when it is not available.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give it back."""

    @abstractmethod
    async def address_for(self, name: str) -> str:
        """tcp://host:port that the process `name` can listen on and others reach; it stays the same for the run."""

    @abstractmethod
    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
        """Start `python <argv>`; its output goes to its log. Raises OSError."""

    # ------------------------------------------------------------ what is shared

    @property
    def names(self) -> list[str]:
        """Processes believed to run."""
        return list(self._children)

    def pid_of(self, name: str) -> int | None:
        """Process id, or None when no such process runs or it is not known yet."""
        child = self._children.get(name)
        return (child.process.pid or None) if child else None

    def awaits(self, name: str) -> str:
        """What the process waits for before it can be started at all; empty: nothing, or there is no such process."""
        child = self._children.get(name)
        return child.process.awaited if child and child.process.returncode is None else ""

    def cpu_s_of(self, name: str) -> float | None:
        """Processor time the process has spent, and what it started; None when that cannot be known."""
        child = self._children.get(name)
        return child.process.cpu_s if child else None

    def rss_mb_of(self, name: str) -> float | None:
        """Resident memory of the process in MiB; None when that cannot be known."""
        child = self._children.get(name)
        return child.process.rss_mb if child else None

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process whose it can be known, what it started included, and of this one."""
        here = {os.getpid(): CONTROLLER} | {
            child.process.pid: name for name, child in self._children.items() if isinstance(child.process, LocalPid)
        }
        spent = processor.cpu_seconds(here, starter=os.getpid())
        used = {name: child.process.cpu_s for name, child in self._children.items() if name not in here.values()}
        return {here[pid]: seconds for pid, seconds in spent.items()} | {
            name: seconds for name, seconds in used.items() if seconds is not None
        }

    def log_of(self, name: str) -> Path:
        """Where the process writes stdout and stderr."""
        return self._log_dir / f"{name}.log"

    async def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start `python <argv>`; its output is appended to logs/<name>.log. Returns the process id, 0 if not known yet.

        Raises OperationError when it is refused (no room for a log, no more processes).
        """
        assert name not in self._children, f"{name} is already running"
        try:
            process = await self._spawn(name, argv, environment)
        except OSError as error:
            raise OperationError(f"cannot start {name}: {error}") from error
        self._children[name] = Child(name, process)
        return process.pid

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
                child.process.kill()
                ended.append(Exit(name, child.process.pid, child.process.returncode, child.is_stopping))
        return ended

    def terminate(self, name: str) -> None:
        """SIGTERM: end gracefully."""
        if (child := self._children.get(name)) and child.process.returncode is None:
            child.is_stopping = True
            child.process.terminate()

    def kill(self, name: str) -> None:
        """SIGKILL to the process and all it started."""
        if (child := self._children.get(name)) and child.process.returncode is None:
            child.is_stopping = True
            child.process.kill()

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
