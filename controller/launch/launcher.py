"""Processes of a run by name, independent of their location: running processes, exits, and expected exits.

Manages names, logs, and the order of a shutdown. Processes are started in local.py (this machine) and
cluster/launcher.py (Ray cluster); restarts are decided in supervisor.py.
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

from areal_like.encryption.texts import Texts
from areal_like.errors import OperationError
from controller.launch import processor
from controller.launch.pids import LocalPid

CONTROLLER = "controller"
"""The controller's own name among the processes."""
TAIL_BYTES = 64_000
"""Bytes read from the end of a log for its tail."""
KILL_WAIT_S = 5.0
"""Time limit for a killed process to exit."""
WAIT_SLICE_S = 0.1
"""Interval of checks for a second signal while waiting for processes."""

Say = Callable[[str], None]


class Spawned(Protocol):
    """One started process, on this machine or another."""

    @property
    def pid(self) -> int:
        """Process id on its own machine; 0 if not known yet."""

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    @property
    def cpu_s(self) -> float | None:
        """Processor time of it and its descendants; None if unknown."""

    @property
    def rss_mb(self) -> float | None:
        """Resident memory in MiB, without its children; None if unknown."""

    @property
    def awaited(self) -> str:
        """What it waits for before it can be started, as text; empty: nothing."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL to it and its descendants."""

    async def wait(self) -> None:
        """Wait until it has exited."""


@dataclass
class Child:
    """One process by its name."""

    name: str
    process: Spawned
    is_stopping: bool = False
    """It was requested to exit, so its exit is expected."""


@dataclass(frozen=True)
class Exit:
    """A process that exited since the last call."""

    name: str
    pid: int
    returncode: int
    expected: bool


def tail_of(log_path: Path, num_lines: int = 15, *, start: int = 0) -> str:
    """The last lines of a log file after byte `start`, as text; empty if there are none."""
    try:
        with log_path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return Texts.to_show(log_path).opened_in("log", "\n".join(lines[-num_lines:]))


class Launcher(ABC):
    """Processes of one run, by name. `open` before the first start, `close` when all are stopped."""

    is_forking = False
    """Whether it forks processes from one that has imported their modules."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self.user_path = Path.cwd()
        """Folder of the user's modules, by its path at the start; a job's folder may be re-created."""
        self._children: dict[str, Child] = {}

    # ------------------------------------------------------------ implemented by subclasses

    @property
    @abstractmethod
    def host(self) -> str:
        """Address that the controller binds, and by which processes reach it. Known once open."""

    @abstractmethod
    async def open(self, say: Say) -> bool:
        """Acquire what is needed to start processes; True once it is available.

        Raises UserError or OperationError if it is not available.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release it."""

    @abstractmethod
    async def address_for(self, name: str) -> str:
        """tcp://host:port on which the process `name` can listen and which others can reach; constant for the run."""

    @abstractmethod
    async def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Spawned:
        """Start `python <argv>`; its output is written to its log. Raises OSError."""

    # ------------------------------------------------------------ shared by all launchers

    @property
    def names(self) -> list[str]:
        """Processes believed to run."""
        return list(self._children)

    def pid_of(self, name: str) -> int | None:
        """Process id, or None if no such process runs or it is not known yet."""
        child = self._children.get(name)
        return (child.process.pid or None) if child else None

    def awaits(self, name: str) -> str:
        """What the process waits for before it can be started; empty: nothing, or there is no such process."""
        child = self._children.get(name)
        return child.process.awaited if child and child.process.returncode is None else ""

    def cpu_s_of(self, name: str) -> float | None:
        """Processor time of the process and its descendants; None if unknown."""
        child = self._children.get(name)
        return child.process.cpu_s if child else None

    def rss_mb_of(self, name: str) -> float | None:
        """Resident memory of the process in MiB; None if unknown."""
        child = self._children.get(name)
        return child.process.rss_mb if child else None

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of every process for which it is known, including descendants, and of this process."""
        here = self._here()
        spent = processor.cpu_seconds(here, starter=os.getpid())
        used = {name: child.process.cpu_s for name, child in self._children.items() if name not in here.values()}
        return {here[pid]: seconds for pid, seconds in spent.items()} | {
            name: seconds for name, seconds in used.items() if seconds is not None
        }

    def queue_seconds(self) -> dict[str, float]:
        """Seconds that threads of each process of this machine waited for a core; empty where this is unknown."""
        here = self._here()
        return {here[pid]: seconds for pid, seconds in processor.queue_seconds(here).items()}

    def _here(self) -> dict[int, str]:
        """Processes of this machine by id, including this one."""
        return {os.getpid(): CONTROLLER} | {
            child.process.pid: name for name, child in self._children.items() if isinstance(child.process, LocalPid)
        }

    def log_of(self, name: str) -> Path:
        """Log file of the process's stdout and stderr."""
        return self._log_dir / f"{name}.log"

    async def start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start `python <argv>`; its output is appended to logs/<name>.log. Returns the process id, 0 if not known yet.

        Raises OperationError if it cannot be started (no space for a log, no more processes).
        """
        assert name not in self._children, f"{name} is already running"
        try:
            process = await self._spawn(name, argv, environment)
        except OSError as error:
            raise OperationError(f"cannot start {name}: {error}") from error
        self._children[name] = Child(name, process)
        return process.pid

    def is_running(self, name: str) -> bool:
        """Return whether the process is running."""
        child = self._children.get(name)
        return child is not None and child.process.returncode is None

    def reap(self) -> list[Exit]:
        """Return the processes that have exited since the last call and remove them; their descendants are killed."""
        ended = []
        for name, child in list(self._children.items()):
            if child.process.returncode is not None:
                del self._children[name]
                child.process.kill()
                ended.append(Exit(name, child.process.pid, child.process.returncode, child.is_stopping))
        return ended

    def terminate(self, name: str) -> None:
        """Send SIGTERM: exit gracefully."""
        if (child := self._children.get(name)) and child.process.returncode is None:
            child.is_stopping = True
            child.process.terminate()

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process and its descendants."""
        if (child := self._children.get(name)) and child.process.returncode is None:
            child.is_stopping = True
            child.process.kill()

    async def stop_all(self, grace_s: float, is_hurried: Callable[[], bool] = lambda: False) -> list[str]:
        """Send SIGTERM to all, then SIGKILL to those still running after `grace_s`; return the names of killed
        processes.

        is_hurried: polled; when it returns True, the grace period is over.
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
