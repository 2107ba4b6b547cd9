"""Processes forked from one that has imported already what they need.

Owns: starting the fork server of a launcher, asking it for processes, hearing how they ended. Refuses: the fork itself
(areal_like/forkserver.py), and which processes come this way (local.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.launch.pids import LocalPid, start_python

log = logging.getLogger(__name__)

READY_S = 120.0
"""Imports that take longer than this are done by each process itself."""
ANSWER_S = 10.0
SHARED = "AREAL_LIKE_FORKSERVER"
"""Environment variable: where a fork server listens that serves many runs (for a series of short ones)."""
KILLED = -int(signal.SIGKILL)


class ForkedProcess(LocalPid):
    """A process whose parent is the fork server; it ends at the latest with that."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self._returncode: int | None = None
        self._ended = asyncio.Event()

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._returncode

    def end(self, returncode: int) -> None:
        """It has ended."""
        if self._returncode is None:
            self._returncode = returncode
            self._ended.set()

    async def wait(self) -> None:
        """Until it has ended."""
        await self._ended.wait()


class ForkServerGone(OSError):
    """It ended, or did not answer: processes are started in the ordinary way from now on."""


class Forker:
    """The starter's side of one fork server. `open` once, from the main thread's event loop."""

    def __init__(self, log_path: Path, preload: Sequence[str]) -> None:
        self._log_path = log_path
        self._preload = list(preload)
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._answers: asyncio.Queue[ForkedProcess | OSError] = asyncio.Queue()
        self._one_at_a_time = asyncio.Lock()
        self._living: dict[int, ForkedProcess] = {}

    async def open(self, environment: Mapping[str, str]) -> None:
        """Start it; it imports while we go on. Or share the one that serves at SHARED. Raises OSError."""
        if shared := os.environ.get(SHARED):
            reader, self._writer = await asyncio.open_unix_connection(shared)
            self._listening = asyncio.create_task(self._listen(reader))
            return
        ours, theirs = socket.socketpair()
        try:
            argv = ["-m", "areal_like.forkserver", "--starter", str(os.getpid()), *self._preload]
            self._process = await start_python(argv, environment, self._log_path, stdin=theirs.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._listening = asyncio.create_task(self._listen(reader))

    @property
    def is_gone(self) -> bool:
        """Nothing can be had from it any more."""
        return self._gone.is_set()

    async def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> ForkedProcess:
        """Start `python -m <module> <arguments>`. Raises ForkServerGone; OSError when no process can be had."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "log": str(log_path),
            "title": " ".join([sys.executable, "-P", "-m", module, *arguments]),
        }
        async with self._one_at_a_time:
            await self._unless_gone(self._ready.wait(), READY_S)
            assert self._writer is not None
            self._writer.write(json.dumps(request).encode() + b"\n")
            answer = await self._unless_gone(self._answers.get(), ANSWER_S)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def close(self) -> None:
        """End it, and with it whatever of its children still lives."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._listening is not None:
            await self._listening

    async def _unless_gone(self, wait: Any, deadline_s: float) -> Any:
        gone, answer = asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(wait)
        try:
            await asyncio.wait((gone, answer), timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if not gone.done():
                self._give_up(f"no answer within {deadline_s:g} s")
            raise ForkServerGone("the fork server is gone")
        finally:
            gone.cancel()
            answer.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._hear(json.loads(line))
        except (OSError, ValueError) as error:
            log.warning("fork server: %s", error)
        self._give_up("it has ended")

    def _hear(self, words: dict[str, Any]) -> None:
        if "ended" in words:
            if process := self._living.pop(words["ended"], None):  # none: it was given up with the server
                process.end(words["status"])
        elif "ready" in words:
            self._ready.set()
        elif "pid" in words:
            process = self._living[words["pid"]] = ForkedProcess(words["pid"])
            self._answers.put_nowait(process)
        else:
            self._answers.put_nowait(OSError(words["error"]))

    def _give_up(self, why: str) -> None:
        """Its children end with it: the kernel sees to that."""
        if self._gone.is_set():
            return
        self._gone.set()
        log.info("fork server %s: %s", self._process.pid if self._process else "", why)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        for process in self._living.values():
            process.end(KILLED)
        self._living.clear()
