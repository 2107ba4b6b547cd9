"""The service's end of one process that runs user code: start, exit, killing, and its output.

Messages over the stream are defined by subclasses.

An exit is detected in two ways: the stream ends, or `check` (called by a monitor) finds that the process has exited.
The second is needed if a forked child of the user code keeps the stream open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Self, TypeVar

from areal_like.errors import OperationError
from services.processes import process_tree
from services.processes.framing import MAX_ANSWER_BYTES, PREFIX

log = logging.getLogger(__name__)

LOGGED_BYTES_PER_MINUTE = 256_000
"""Bytes of output of all such processes that are logged per minute; the rest is dropped."""
LAST_WORDS_S = 0.2
Started = TypeVar("Started")


class Died(OperationError):
    """The process ended, or broke its stream, in the middle of an exchange; or it could not start.

    `scorer`: the scorer that ran in it, empty if unknown. is_killed: by a SIGKILL from somebody else, for example the
    kernel when memory ran out.
    """

    def __init__(self, reason: str, scorer: str = "", *, is_killed: bool = False) -> None:
        self.reason, self.scorer, self.is_killed = reason, scorer, is_killed
        super().__init__(reason)


async def start_first(start: Callable[[], Awaitable[Started]]) -> Started:
    """Start the process that shows the mistakes of the user's code: once more if it was killed. Raises Died."""
    try:
        return await start()
    except Died as error:
        if not error.is_killed:
            raise
        log.warning("%s while it was loading; starting another process", error.reason)
        return await start()


class OutputLog:
    """Writes the output of user code to the service's stderr, with a limit per minute."""

    def __init__(self, who: str = "scorers") -> None:
        self._who = who
        self._room_bytes, self._until_s, self.num_dropped_bytes = 0, 0.0, 0

    def write(self, chunk: bytes) -> None:
        """Write as much as the limit allows."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._room_bytes, self._until_s = LOGGED_BYTES_PER_MINUTE, now_s + 60.0
        passed = chunk[: self._room_bytes]
        if passed:
            sys.stderr.write(passed.decode(errors="replace"))
            self._room_bytes -= len(passed)
            if not self._room_bytes:
                log.warning("the output of %s exceeds the limit and is discarded for up to a minute", self._who)
        self.num_dropped_bytes += len(chunk) - len(passed)


class ChildProcess:
    """One child in a separate session, with a stream to it. `died` is resolved once it is known to have exited."""

    MODULE: ClassVar[str]
    """`python -m` name; it is started with `--fd N`."""
    NOUN: ClassVar[str]
    """Its name in messages."""

    def __init__(
        self, child: subprocess.Popen[bytes], stream: socket.socket, output_fd: int, output_log: OutputLog
    ) -> None:
        self._child, self._raw, self._output_fd, self._output_log = child, stream, output_fd, output_log
        self.pid = child.pid
        self.killed_because = ""
        """Set by code that kills it outside of an exchange, for the verdict's reason."""
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def spawn(cls, output_log: OutputLog, arguments: Sequence[str] = (), pass_fds: tuple[int, ...] = ()) -> Self:
        """Start the child. Must be called from the main thread (parent-death signal). Raises Died."""
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        try:
            isolation = ["-P"] if sys.flags.safe_path else []
            child = subprocess.Popen(
                [sys.executable, *isolation, "-m", cls.MODULE, *arguments, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(output_read)
            raise Died(f"the {cls.NOUN} cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(output_write)
        os.set_blocking(output_read, False)
        process = cls(child, ours, output_read, output_log)
        asyncio.get_running_loop().add_reader(output_read, process._drain_output)
        return process

    def check(self) -> bool:
        """Whether the process is running; if not, wakes the exchange that waits for it."""
        if self._child.poll() is None:
            return True
        if not self.died.done():
            self.died.set_result(None)
        return False

    async def kill(self) -> None:
        """Kill it with all its descendants, reap it, and close its streams."""
        if self.check():  # once it is reaped, its process id may be reused; the pool kills its orphans
            left = await process_tree.kill_tree(self.pid)
            if left:
                log.error("the processes %s of the %s are still running after SIGKILL", sorted(left), self.NOUN)
            await self._reaped(1.0)
        self._close()

    def kill_now(self) -> None:
        """As `kill`, without waiting, for a service that exits."""
        if self.check():
            process_tree.kill_tree_now(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1.0)
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._raw.close()
        self._close_output()

    async def _receive_body(self) -> bytes:
        """The next frame's body. Raises ValueError if it is too long, IncompleteReadError at the end of the stream."""
        assert self._reader is not None, "prepare comes first"
        length = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))[0]
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"the reply of the process is too long: {length} bytes (limit {MAX_ANSWER_BYTES})")
        return await self._reader.readexactly(length)

    async def _cause_of_death(self, error: Exception | None) -> str:
        await self._reaped(LAST_WORDS_S)  # the stream may end shortly before the process
        status = self._child.returncode
        if self.killed_because:
            return self.killed_because
        if status is None:
            return f"the connection to the {self.NOUN} failed ({type(error).__name__}: {error})"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            return f"the {self.NOUN} was killed by signal {name}"
        return f"the {self.NOUN} ended with status {status}"

    async def _died(self, error: Exception | None, scorer: str = "") -> Died:
        reason = await self._cause_of_death(error)
        is_killed = self._child.returncode == -signal.SIGKILL and not self.killed_because
        return Died(reason, scorer, is_killed=is_killed)

    async def _reaped(self, timeout_s: float) -> None:
        """Wait until the child is reaped, or `timeout_s` is over."""
        give_up_s = time.monotonic() + timeout_s
        while self.check() and time.monotonic() < give_up_s:  # noqa: ASYNC110  (waitpid tells nobody)
            await asyncio.sleep(0.005)

    def _drain_output(self) -> None:
        try:
            chunk = os.read(self._output_fd, 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._close_output()
            return
        self._output_log.write(chunk)

    def _close_output(self) -> None:
        if self._output_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._output_fd)
            os.close(self._output_fd)
            self._output_fd = -1
