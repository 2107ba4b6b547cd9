"""The processes of one server: starts the server so that it cannot outlive this process, watches it and ends it.

HTTP is in client.py, restarts in keeper.py.

Three independent means prevent orphans: the guard (areal_like/guard.py) kills the whole process tree when this process
or the server exits; the kernel kills the server with its guard; and all processes stay in our process group, which the
launcher kills as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_like.errors import EngineError
from areal_like.guard import STDIN, guarded, remove_recorded
from areal_like.process import describe_status, is_alive

TAIL_BYTES = 64_000
END_WAIT_S = 2.0
SHARED_MEMORY = ("sem.mp-", "psm_", "torch_")
"""Prefixes of the files in /dev/shm that multiprocessing and torch leave when they are killed."""


@dataclass(frozen=True)
class ServerSetup:
    """Paths and settings of an engine's servers. `name`: distinguishes the workers of a run. `port`: of its server;
    None: any free one. `start_timeout_s`: time limit of each start.
    """

    name: str
    log_path: Path
    seed: int
    port: int | None = None
    start_timeout_s: float = 1800.0


class ServerProcess:
    """A started server and its descendants. Create it with `start`. `process` is the guard, which exits with the
    server's status; both run as long as its standard input is open.
    """

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, log_start: int, scratch: Path) -> None:
        self._process, self._log_path, self._log_start, self._scratch = process, log_path, log_start, scratch
        self._family: dict[int, psutil.Process] = {}
        self._front: psutil.Process | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        scratch: Path,
        shared_memory: Sequence[str] = SHARED_MEMORY,
    ) -> ServerProcess:
        """Start it; its output is appended to `log_path`. Raises EngineError if it cannot be started.

        `shared_memory`: prefixes of its files in /dev/shm.
        """
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            # A server may log all its arguments there, including its key.
            with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                os.fchmod(log.fileno(), 0o600)
                log_start = log.seek(0, os.SEEK_END)
                process = await asyncio.create_subprocess_exec(
                    *guarded(command, until=STDIN, shared_memory=shared_memory),
                    env=dict(environment),
                    cwd=scratch,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                )
        except OSError as error:
            raise EngineError(f"the server cannot be started: {error}") from error
        return cls(process, log_path, log_start, scratch)

    @property
    def pid(self) -> int:
        """Process id of the server's front process, or of its guard before that exists."""
        if self._front is not None:
            return self._front.pid
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children():
                return child.pid
        return self._process.pid

    def remember_family(self) -> None:
        """Record the server's processes, once it is ready: from now on the exit of any of them counts as the server's
        exit."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._front = psutil.Process(self.pid)
            for child in psutil.Process(self._process.pid).children(recursive=True):
                if "resource_tracker" not in " ".join(_command_of(child)):
                    self._family[child.pid] = child

    def why_ended(self) -> str | None:
        """Why the server has ended, once the front process or a recorded process has exited; None while all run."""
        if self._process.returncode is not None:
            return f"the server ended with {describe_status(self._process.returncode)}"
        if self._front is not None and not is_alive(self._front):
            return None  # its guard is still cleaning up, and then has the status
        for pid, member in self._family.items():
            if not is_alive(member):
                return f"process {pid} of the server ended"
        return None

    async def end(self) -> None:
        """Have the guard kill the whole process tree, and wait until it has exited; processes that are left after
        END_WAIT_S are killed directly, including the guard. Safe to call twice.
        """
        members = dict(self._family)
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                members[child.pid] = child
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not await self._is_gone(members):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            for member in members.values():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    member.send_signal(signal.SIGKILL)
            await self._is_gone(members)
        await asyncio.to_thread(remove_recorded, self._scratch)  # the guard has done this, unless it was killed

    async def _is_gone(self, members: Mapping[int, psutil.Process]) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_WAIT_S):
                await self._process.wait()
                while any(is_alive(member) for member in members.values()):  # noqa: ASYNC110 - not our processes
                    await asyncio.sleep(0.02)
                return True
        return False

    def log_tail(self) -> str:
        """The end of the log of this server, without that of earlier ones."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def make_scratch(prefix: str) -> Path:
    """Create a folder for one engine's servers, with a path that is short enough for sockets. Folders of dead workers
    with this prefix are removed."""
    root = Path(tempfile.gettempdir())
    for old in root.glob(f"{prefix}*-*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and old.stat().st_uid == os.getuid():
                remove_recorded(old)
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=root))


def last_words(tail: str) -> str:
    """The last line of a log with an error, else its last line."""
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)\b", line)]
    return (telling or lines or ["the server printed nothing"])[-1][:300]
