"""The service's end of one scoring process: one exchange at a time.

Start, exit and output of the process are in child_process.py, replacing processes in pool.py, retries in
request_scheduler.py.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from areal_like.descendants import descendants_of
from areal_like.errors import OperationError, UserError
from services.processes import process_tree
from services.processes.child_process import LAST_WORDS_S, ChildProcess, Died, OutputLog
from services.processes.framing import frame
from services.reward.job import Began, Outcome, Ready, Refusal, Setup, decode_for_service

_T = TypeVar("_T")


class Overdue(OperationError):
    """The process did not answer in time and must be killed. `scorer`: the one that was running."""

    def __init__(self, scorer: str) -> None:
        self.scorer = scorer
        super().__init__(f"{scorer} did not end in time")


class ScoringProcess(ChildProcess):
    """One child; `score` may be called again only after it returned an Outcome."""

    MODULE, NOUN = "services.reward.scoring_process", "scoring process"

    def __init__(
        self, child: subprocess.Popen[bytes], stream: socket.socket, output_fd: int, output_log: OutputLog
    ) -> None:
        super().__init__(child, stream, output_fd, output_log)
        self.num_scored = 0
        self.helpers: frozenset[int] = frozenset()
        """Its child processes when it became ready: helpers of scorers."""
        self._scorer = ""

    async def prepare(self, setup: Setup, timeout_s: float) -> Ready:
        """Send the setup and wait until the scorers are loaded. Raises UserError for a refusal, Died otherwise."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._raw)
        answer = await self._within(self._first_answer(setup), timeout_s, "loading the scorers")
        if isinstance(answer, Refusal):
            raise UserError(answer.sentence)
        if not isinstance(answer, Ready):
            raise Died("the scoring process sent an unexpected message while loading")
        self.helpers = frozenset(descendants_of(self.pid))
        return answer

    async def score(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        """One exchange. `job` is a framed Job. Raises Overdue, Died, or UserError if the user must change something
        before anything can be scored; the process cannot be used afterwards."""
        self._scorer = ""
        outcome = await self._within(self._exchange(job, job_id), limit_s, "")
        if isinstance(outcome, Refusal):
            raise UserError(outcome.sentence)
        self.num_scored += 1
        return outcome

    def leftover_processes(self) -> set[int]:
        """Descendants that are not its helpers."""
        return process_tree.living(set(descendants_of(self.pid)) - self.helpers)

    async def _within(self, exchange_coroutine: Coroutine[Any, Any, _T], limit_s: float, what: str) -> _T:
        """Run it until it ends, the process dies or `limit_s` passes (owner of the wait: the scoring process)."""
        exchange = asyncio.create_task(exchange_coroutine)
        try:
            ends: set[asyncio.Future[Any]] = {exchange, self.died}
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done() and self.died.done():
                await asyncio.wait({exchange}, timeout=LAST_WORDS_S)  # a reply may still be in the stream
            if exchange.done():
                return exchange.result()
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            raise await self._died(error, self._scorer) from error
        finally:
            exchange.cancel()
        if self.died.done():
            raise await self._died(None, self._scorer)
        if what:
            raise Died(f"{what} took longer than {limit_s:g} s")
        raise Overdue(self._scorer)

    async def _first_answer(self, setup: Setup) -> Ready | Refusal | Began | Outcome:
        await self._send(frame(setup))
        return await self._receive()

    async def _exchange(self, job: bytes, job_id: int) -> Outcome | Refusal:
        await self._send(job)
        while True:
            message = await self._receive()
            if isinstance(message, Began) and message.job_id == job_id:
                self._scorer = message.scorer
            elif (isinstance(message, Outcome) and message.job_id == job_id) or isinstance(message, Refusal):
                return message
            else:
                raise ValueError(f"unexpected {type(message).__name__}")

    async def _send(self, body: bytes) -> None:
        assert self._writer is not None, "prepare comes first"
        self._writer.write(body)
        await self._writer.drain()  # bounded by _within

    async def _receive(self) -> Ready | Refusal | Began | Outcome:
        return decode_for_service(await self._receive_body())
