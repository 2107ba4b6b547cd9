"""Starts processes by forking a server that has already imported the modules they need.

Starts the fork server of a launcher, requests processes and receives their exits. The fork itself is in
areal_like/forkserver.py; which processes are forked is decided in local.py.

A run does not depend on the server. Every request has a deadline, and is abandoned immediately if the kernel reports
the server as stopped; the exit of a child is also read from the kernel (pidfd, /proc). An unresponsive server is not
killed, because its children would be killed with it: later processes are started normally until it answers again, and
processes that it forks for an abandoned request are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.forkserver import peer_uid
from controller.launch.early import SHARED, EarlyServer, server_arguments, take
from controller.launch.pids import LocalPid, exit_status, is_stopped, start_python

log = logging.getLogger(__name__)

READY_S = 120.0
"""Time limit of the imports; after it, each process imports its own modules."""
ANSWER_S = 10.0
LOOK_S = 0.5
"""Interval of checks whether the server is stopped, during a wait."""
REPORT_S = 1.0
"""Time within which the server must report an exit that the kernel has reported; else it is unresponsive."""
CLOSE_S = 5.0
"""Time limit for a killed server to exit."""
KILLED = -int(signal.SIGKILL)


class ForkedProcess(LocalPid):
    """A process whose parent is the fork server; it is killed when the server exits."""

    def __init__(self, pid: int, on_unreported: Callable[[int], None]) -> None:
        """`on_unreported(pid)`: called if it has exited, and the server has not reported it within REPORT_S."""
        super().__init__(pid)
        self._returncode: int | None = None
        self._ended = asyncio.Event()
        self._on_unreported = on_unreported
        self._pidfd = -1
        with contextlib.suppress(OSError):  # already exited, or no such system call: the server will report it
            self._pidfd = os.pidfd_open(pid)
            asyncio.get_running_loop().add_reader(self._pidfd, self._seen_ended)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._returncode

    def end(self, returncode: int) -> None:
        """Record its exit."""
        if self._returncode is None:
            self._returncode = returncode
            self._ended.set()
            self._forget_pidfd()

    def _seen_ended(self) -> None:
        """Handle that the kernel reports its exit; a responsive server will report it too, with the exit code."""
        status = exit_status(self.pid)
        self._forget_pidfd()
        asyncio.get_running_loop().call_later(REPORT_S, self._unreported, KILLED if status is None else status)

    def _unreported(self, status: int) -> None:
        if self._returncode is None:
            self.end(status)
            self._on_unreported(self.pid)

    def _forget_pidfd(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    async def wait(self) -> None:
        """Wait until it has exited."""
        await self._ended.wait()


class ForkServerGone(OSError):
    """Raised if the server has exited or does not answer: the process is then started normally."""


class Forker:
    """Client of one fork server. `open` once, from the main thread's event loop."""

    def __init__(self, log_path: Path, preload: Sequence[str], say: Callable[[str], None]) -> None:
        """`say`: informs the user if processes are started without the fork server."""
        self._log_path, self._say = log_path, say
        self._preload = list(preload)
        self._process: asyncio.subprocess.Process | EarlyServer | None = None
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._answer: asyncio.Future[ForkedProcess | OSError] | None = None
        """Answer to the present request; None: there is no request."""
        self._one_at_a_time = asyncio.Lock()
        self._living: dict[int, ForkedProcess] = {}
        self._server_pid: int | None = None
        self._unresponsive = ""
        """Why it is not used; empty: it answers."""
        self._num_abandoned = 0
        """Number of abandoned requests that may still be answered."""

    async def open(self, environment: Mapping[str, str]) -> None:
        """Start the server, which imports in the background, or use the one that was started early, or the shared one
        at SHARED. Raises OSError.
        """
        if shared := os.environ.get(SHARED):
            async with asyncio.timeout(ANSWER_S):
                reader, self._writer = await asyncio.open_unix_connection(shared)
            if peer_uid(self._writer.get_extra_info("socket")) != os.getuid():
                self._writer.close()
                raise PermissionError(f"{shared}: this fork server belongs to another user")
            self._server_pid = _peer_of(self._writer)
            self._listening = asyncio.create_task(self._listen(reader))
            return
        if early := take(self._preload):
            self._process, connection = early, early.connection
        else:
            self._process, connection = await self._start(environment)
        self._server_pid = self._process.pid
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._listening = asyncio.create_task(self._listen(reader))

    async def _start(self, environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            argv = server_arguments(self._preload)
            return await start_python(argv, environment, self._log_path, stdin=theirs.fileno()), ours
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def is_gone(self) -> bool:
        """Return whether the server has exited or is closed."""
        return self._gone.is_set()

    async def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> ForkedProcess:
        """Start `python -m <module> <arguments>`. Raises ForkServerGone, or OSError if no process can be started."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "log": str(log_path),
            "title": " ".join([sys.executable, "-P", "-m", module, *arguments]),
        }
        async with self._one_at_a_time:
            if self._unresponsive:
                raise ForkServerGone(self._unresponsive)
            await self._unless_gone(self._ready.wait(), READY_S, "it is not ready")
            assert self._writer is not None
            answer = self._answer = asyncio.get_running_loop().create_future()
            self._writer.write(json.dumps(request).encode() + b"\n")
            try:
                await self._unless_gone(asyncio.shield(answer), ANSWER_S, "it does not respond")
            except BaseException:
                self._abandon(answer)
                raise
            finally:
                self._answer = None
        if isinstance(found := answer.result(), OSError):
            raise found
        return found

    def _abandon(self, answer: asyncio.Future[ForkedProcess | OSError]) -> None:
        """Abandon a request; its answer may have arrived at the same moment."""
        if not answer.done():
            self._num_abandoned += 1
        elif isinstance(found := answer.result(), ForkedProcess):
            found.kill()

    async def close(self) -> None:
        """End the server and its remaining children."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._process.wait()
            if isinstance(self._process, EarlyServer):
                self._process.write_output(self._log_path)
        if self._listening is not None:
            await asyncio.wait([self._listening], timeout=CLOSE_S)

    async def _unless_gone(self, wait: Any, deadline_s: float, late: str) -> Any:
        """Result of `wait`. Raises ForkServerGone if the server has exited or is stopped, or with `late` at the
        deadline.
        """
        gone, answer = asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(wait)
        due_s = time.monotonic() + deadline_s
        try:
            while True:
                await asyncio.wait((gone, answer), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                if gone.done():
                    raise ForkServerGone("the fork server has ended")
                if is_stopped(self._server_pid):
                    self._distrust("it is stopped (SIGSTOP)")
                elif time.monotonic() > due_s:
                    self._distrust(f"{late} within {deadline_s:g} s")
                if self._unresponsive:
                    raise ForkServerGone(self._unresponsive)
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
        if self._unresponsive:
            log.info("the fork server is responding again")
            self._unresponsive = ""
        if self._num_abandoned and ("pid" in words or "error" in words):
            self._num_abandoned -= 1
            if "pid" in words:
                self._forked(words["pid"]).kill()
        elif "ended" in words:
            if process := self._living.pop(words["ended"], None):  # none: it was abandoned with the server
                process.end(words["status"])
        elif "ready" in words:
            self._server_pid = words["server"]
            self._ready.set()
        elif self._answer is not None:
            self._answer.set_result(self._forked(words["pid"]) if "pid" in words else OSError(words["error"]))

    def _forked(self, pid: int) -> ForkedProcess:
        """Register a new child of the server, whose exit the server will report."""
        process = self._living[pid] = ForkedProcess(pid, self._unreported)
        return process

    def _unreported(self, pid: int) -> None:
        self._living.pop(pid, None)
        stopped = ": it is stopped (SIGSTOP)" if is_stopped(self._server_pid) else ""
        self._distrust(f"it does not report that process {pid} has ended{stopped}")

    def _distrust(self, why: str) -> None:
        if not self._unresponsive and not self._gone.is_set():
            self._unresponsive = f"fork server (process {self._server_pid}): {why}"
            self._say(f"{self._unresponsive}; processes are started without the fork server")

    def _give_up(self, why: str) -> None:
        """Stop using the server; its children are killed with it by the kernel."""
        if self._gone.is_set():
            return
        self._gone.set()
        log.info("fork server (process %s): %s", self._process.pid if self._process else "unknown", why)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        for process in self._living.values():
            process.end(KILLED)
        self._living.clear()


def _peer_of(writer: asyncio.StreamWriter) -> int | None:
    """Process at the other end of a Unix socket."""
    connection = writer.get_extra_info("socket")
    try:
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except (OSError, AttributeError):
        return None
    return int(pid)
