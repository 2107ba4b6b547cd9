"""Requests in, exactly one verdict each out.

Owns: the bounded queue, duplicates, retries, the deadline of a request, turning outcomes into verdicts. Refuses:
sockets (server), processes (pool).

Back-pressure: `take` waits while `max_queue` requests are waiting, and the server reads no further message meanwhile.
What is not read stays in ZeroMQ's bounded queues and in the clients, which hold their own samples back. Nothing is
dropped and nothing is refused for lack of room.

Duplicates: a request is named by its client and its id. One that is still waiting or running is not taken again and is
answered once; one of the last MAX_REPLIES finished ones gets its verdict again, since the first reply may be lost. A
client that starts anew (another incarnation) starts with a clean sheet.

Deadlines: one attempt may take `timeout_s`, all attempts of a request together its `deadline_s`; queueing is excluded.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from areal_like.messages import ScoreReply, ScoreRequest
from areal_like.verdict import Verdict
from services.config import RewardSettings
from services.reward.job import MAX_REASON_CHARS, Job, Outcome, frame
from services.reward.pool import Pool
from services.reward.tally import Tally

MAX_REPLIES = 8192
"""Finished verdicts remembered for clients that ask again: several clients' worth of requests in flight."""
MIN_ATTEMPT_S = 0.05
"""With less than this left no further attempt is made."""

Key = tuple[str, str]


@dataclass
class Entry:
    """One request on its way."""

    peer: str
    request: ScoreRequest
    came_s: float
    is_abandoned: bool = False
    """Its client is gone: nobody waits for the verdict."""


class Desk:
    """`take` from one task, `work` in `num_workers` tasks. `reply(peer, message)` sends and says whether it could."""

    def __init__(
        self,
        pool: Pool,
        settings: RewardSettings,
        reply: Callable[[str, ScoreReply], bool],
        on_busy: Callable[[bool], None] = lambda is_busy: None,
    ) -> None:
        """`on_busy` is told when the first lane begins to work and when the last has nothing left."""
        self._pool, self._settings, self._reply, self._on_busy = pool, settings, reply, on_busy
        self._queue: asyncio.Queue[Entry] = asyncio.Queue(maxsize=settings.max_queue)
        self._open: dict[Key, Entry] = {}
        self._finished: OrderedDict[Key, Verdict] = OrderedDict()
        self._incarnations: dict[str, str] = {}
        self._job_ids = itertools.count(1)
        self._num_working = 0
        self.tally = Tally()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.qsize()

    @property
    def is_full(self) -> bool:
        """The queue has no room: `take` waits."""
        return self._queue.full()

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._num_working and self._queue.empty()

    def welcome(self, peer: str, incarnation: str) -> None:
        """A client said Hello. Another incarnation than before: what it asked earlier is void."""
        if self._incarnations.get(peer) != incarnation:
            self.dismiss(peer)
            self._incarnations[peer] = incarnation

    def dismiss(self, peer: str) -> None:
        """A client is gone for good."""
        self._incarnations.pop(peer, None)
        for key in [key for key in self._open if key[0] == peer]:
            self._open.pop(key).is_abandoned = True
        for key in [key for key in self._finished if key[0] == peer]:
            del self._finished[key]

    async def take(self, peer: str, request: ScoreRequest) -> None:
        """Take a request in; waits for room (owner of the wait: the lanes, each bounded by its deadlines)."""
        key = (peer, request.request_id)
        if key in self._open:
            self.tally.count("duplicates")
        elif (verdict := self._finished.get(key)) is not None:
            self.tally.count("duplicates")
            self._send(peer, request.request_id, verdict)
        else:
            entry = Entry(peer, request, time.monotonic())
            self._open[key] = entry
            await self._queue.put(entry)

    async def work(self, on_scored: Callable[[Entry, Verdict, float], None]) -> None:
        """One lane: score one request after the other until cancelled. `on_scored` is told the moment it began."""
        while True:
            entry = await self._queue.get()  # nothing is owed while there is no request
            self._num_working += 1
            if self._num_working == 1:
                self._on_busy(True)
            try:
                if entry.is_abandoned:
                    self.tally.count("abandoned")
                    continue
                began_s = time.monotonic()
                verdict = await self._judge(entry.request)
                self._finish(entry, verdict, began_s)
                on_scored(entry, verdict, began_s)
            finally:
                self._num_working -= 1
                if not self._num_working:
                    self._on_busy(False)

    def _finish(self, entry: Entry, verdict: Verdict, began_s: float) -> None:
        self.tally.add_verdict(verdict, began_s - entry.came_s)
        if entry.is_abandoned:
            self.tally.count("abandoned")
            return
        key = (entry.peer, entry.request.request_id)
        self._open.pop(key, None)
        self._finished[key] = verdict
        if len(self._finished) > MAX_REPLIES:
            self._finished.popitem(last=False)
        self._send(*key, verdict)

    def _send(self, peer: str, request_id: str, verdict: Verdict) -> None:
        if not self._reply(peer, ScoreReply(request_id=request_id, verdict=verdict)):
            self.tally.count("undelivered")  # it asks again when it is back, and finds the verdict remembered

    async def _judge(self, request: ScoreRequest) -> Verdict:
        """The verdict on one request, after as many attempts as settings and deadline allow."""
        started_s = time.monotonic()
        outcome = Outcome(job_id=0, kind="invalid", reason=f"deadline_s {request.deadline_s} is not a positive number")
        num_attempts, remaining_s = 0, request.deadline_s
        while num_attempts <= self._settings.retries and math.isfinite(remaining_s) and remaining_s > 0:
            job_id = next(self._job_ids)
            job = self._framed(job_id, request)
            if isinstance(job, Outcome):
                outcome = job
                break
            if num_attempts:
                self.tally.count("retries")
            num_attempts += 1
            outcome = await self._pool.attempt(job, job_id, min(self._settings.timeout_s, remaining_s))
            self.tally.add_attempt(outcome.kind, outcome.scorer, outcome.scorer_s)
            remaining_s = request.deadline_s - (time.monotonic() - started_s)
            if outcome.kind not in ("timed_out", "crashed") or remaining_s < MIN_ATTEMPT_S:
                break
        return self._verdict(outcome, request, max(num_attempts, 1), time.monotonic() - started_s)

    def _framed(self, job_id: int, request: ScoreRequest) -> bytes | Outcome:
        try:
            return frame(
                Job(
                    job_id=job_id,
                    scorer=request.scorer,
                    row=request.row,
                    response=request.response,
                    finish_reason=request.finish_reason,
                    num_tokens=request.num_tokens,
                )
            )
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            reason = f"the row cannot be passed to a scorer ({error})"[:MAX_REASON_CHARS]
            return Outcome(job_id=job_id, kind="invalid", reason=reason)

    def _verdict(self, outcome: Outcome, request: ScoreRequest, num_attempts: int, wall_s: float) -> Verdict:
        scorer = request.scorer or self._pool.label
        try:
            return Verdict(
                kind=outcome.kind,  # type: ignore[arg-type]
                value=outcome.value,
                components=outcome.components,
                reason=outcome.reason,
                wall_s=wall_s,
                scorer=scorer,
                attempts=num_attempts,
            )
        except ValueError as error:  # a scoring process forged its answer
            return Verdict(kind="invalid", reason=str(error), wall_s=wall_s, scorer=scorer, attempts=num_attempts)
