"""The service's end of one scoring process: start, one exchange at a time, death, and what it prints.

Owns: the socket pair, the output pipe, the waits of one exchange. Refuses: replacing processes, retries (pool, desk).

Death shows twice: the stream ends, or `check` (called by the pool's monitor) finds the process gone. The second matters
when a forked child of the scorer holds the stream open.
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
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from areal_like.descendants import descendants_of
from areal_like.errors import OperationError, UserError
from services.reward import process_tree
from services.reward.job import (
    MAX_ANSWER_BYTES,
    PREFIX,
    Began,
    Outcome,
    Ready,
    Refusal,
    Setup,
    decode_for_service,
    frame,
)

log = logging.getLogger(__name__)

LOGGED_BYTES_PER_MINUTE = 256_000
"""How much of what all scoring processes print reaches the service's log; the rest is drained and dropped."""
_LAST_WORDS_S = 0.2

_T = TypeVar("_T")


class Overdue(OperationError):
    """The process did not answer in time; it must be killed. `scorer`: the one that was running."""

    def __init__(self, scorer: str) -> None:
        self.scorer = scorer
        super().__init__(f"{scorer} did not end in time")


class Died(OperationError):
    """The process ended, or broke its stream, in the middle of an exchange; or it could not start."""

    def __init__(self, reason: str, scorer: str = "") -> None:
        self.reason, self.scorer = reason, scorer
        super().__init__(reason)


class OutputLog:
    """What scorers print, passed on to the service's own stderr, so much a minute."""

    def __init__(self) -> None:
        self._room_bytes, self._until_s, self.num_dropped_bytes = 0, 0.0, 0

    def write(self, chunk: bytes) -> None:
        """Pass on what there is room for."""
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._room_bytes, self._until_s = LOGGED_BYTES_PER_MINUTE, now_s + 60.0
        passed = chunk[: self._room_bytes]
        if passed:
            sys.stderr.write(passed.decode(errors="replace"))
            self._room_bytes -= len(passed)
            if not self._room_bytes:
                log.warning("scorers print too much; what they print is dropped for a while")
        self.num_dropped_bytes += len(chunk) - len(passed)


class ScoringProcess:
    """One child; `score` may be called again only after it returned an Outcome."""

    def __init__(
        self, child: subprocess.Popen[bytes], stream: socket.socket, output_fd: int, output_log: OutputLog
    ) -> None:
        self._child, self._raw, self._output_fd, self._output_log = child, stream, output_fd, output_log
        self.pid = child.pid
        self.num_scored = 0
        self.killed_because = ""
        """Set by who kills it from outside an exchange, for the verdict's reason."""
        self.helpers: frozenset[int] = frozenset()
        """Its children at the time it became ready: a scorer's own helpers."""
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._scorer = ""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @staticmethod
    def spawn(output_log: OutputLog) -> ScoringProcess:
        """Start the child, in a session of its own. Must be called from the main thread (parent-death signal)."""
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        try:
            isolation = ["-P"] if sys.flags.safe_path else []
            child = subprocess.Popen(
                [sys.executable, *isolation, "-m", "services.reward.scoring_process", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(output_read)
            raise Died(f"a scoring process cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(output_write)
        os.set_blocking(output_read, False)
        process = ScoringProcess(child, ours, output_read, output_log)
        asyncio.get_running_loop().add_reader(output_read, process._drain_output)
        return process

    async def prepare(self, setup: Setup, timeout_s: float) -> Ready:
        """Send the setup and wait until the scorers are loaded. Raises UserError for a refusal, Died otherwise."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._raw)
        answer = await self._within(self._first_answer(setup), timeout_s, "loading the scorers")
        if isinstance(answer, Refusal):
            raise UserError(answer.sentence)
        if not isinstance(answer, Ready):
            raise Died("the scoring process broke its protocol while loading")
        self.helpers = frozenset(descendants_of(self.pid))
        return answer

    async def score(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        """One exchange. `job` is a framed Job. Raises Overdue or Died; the process is useless afterwards."""
        self._scorer = ""
        outcome = await self._within(self._exchange(job, job_id), limit_s, "")
        self.num_scored += 1
        return outcome

    def left_behind(self) -> set[int]:
        """Processes that run below it and are none of its helpers."""
        return process_tree.living(set(descendants_of(self.pid)) - self.helpers)

    def check(self) -> bool:
        """False once the process has ended; wakes the exchange that waits for it."""
        if self._child.poll() is None:
            return True
        if not self.died.done():
            self.died.set_result(None)
        return False

    async def kill(self) -> None:
        """End it with its whole tree, reap it, close everything. Nothing of it runs afterwards."""
        if self.check():  # once it is reaped its number may be another's; its orphans are the pool's to find
            left = await process_tree.kill_tree(self.pid)
            if left:
                log.error("processes %s of a scoring process survived SIGKILL", sorted(left))
            await self._reaped(1.0)
        self._close()

    def kill_now(self) -> None:
        """As `kill`, without waiting: for a service that is on its way out."""
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

    async def _within(self, exchange_coroutine: Coroutine[Any, Any, _T], limit_s: float, what: str) -> _T:
        """Run it until it ends, the process dies or `limit_s` passes (owner of the wait: the scoring process)."""
        exchange = asyncio.create_task(exchange_coroutine)
        try:
            ends: set[asyncio.Future[Any]] = {exchange, self.died}
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done() and self.died.done():
                await asyncio.wait({exchange}, timeout=_LAST_WORDS_S)  # an answer may still be in the stream
            if exchange.done():
                return exchange.result()
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            raise Died(await self._cause_of_death(error), self._scorer) from error
        finally:
            exchange.cancel()
        if self.died.done():
            raise Died(await self._cause_of_death(None), self._scorer)
        if what:
            raise Died(f"{what} took longer than {limit_s:g} s")
        raise Overdue(self._scorer)

    async def _first_answer(self, setup: Setup) -> Ready | Refusal | Began | Outcome:
        await self._send(frame(setup))
        return await self._receive()

    async def _exchange(self, job: bytes, job_id: int) -> Outcome:
        await self._send(job)
        while True:
            message = await self._receive()
            if isinstance(message, Began) and message.job_id == job_id:
                self._scorer = message.scorer
            elif isinstance(message, Outcome) and message.job_id == job_id:
                return message
            else:
                raise ValueError(f"unexpected {type(message).__name__}")

    async def _send(self, body: bytes) -> None:
        assert self._writer is not None, "prepare comes first"
        self._writer.write(body)
        await self._writer.drain()  # bounded by _within

    async def _receive(self) -> Ready | Refusal | Began | Outcome:
        assert self._reader is not None, "prepare comes first"
        length = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))[0]
        if length > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        return decode_for_service(await self._reader.readexactly(length))

    async def _cause_of_death(self, error: Exception | None) -> str:
        await self._reaped(_LAST_WORDS_S)  # the stream may end a moment before the process
        status = self._child.returncode
        if self.killed_because:
            return self.killed_because
        if status is None:
            return f"the scoring process broke its stream ({type(error).__name__}: {error})"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            return f"the scoring process was killed by signal {name}"
        return f"the scoring process ended with status {status}"

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
