"""Schedules score requests: exactly one verdict for each request.

It has the bounded queue, duplicates, retries, deadlines of requests and the cache, and converts outcomes to verdicts.
Sockets are in server.py, processes in pool.py.

Back-pressure: while `max_queue` requests wait, `offer` refuses further ones. The client sends them to another service,
or again later, and holds back its own samples meanwhile. `take`, for callers in the same process, waits for room
instead.

Duplicates: a request is identified by its client and its id. One that is still waiting or running is not accepted again
and is answered once; one of the last MAX_REPLIES finished ones gets its verdict again, since the first reply may be
lost. When a client restarts (with another incarnation), its earlier requests are dropped.

Deadlines: one attempt may take `timeout_s`, all attempts of a request together its `deadline_s`, excluding queueing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from areal_like.verdict import MAX_REASON_CHARS, Verdict
from areal_like.wire.messages import MAX_RESPONSE_CHARS, ScoreRefused, ScoreReply, ScoreRequest
from services.processes.framing import frame
from services.reward.cache import ScoreCache
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome
from services.reward.pool import Pool
from services.reward.tally import Tally

MAX_REPLIES = 8192
"""Number of finished verdicts that are kept for resent requests: the requests in flight of several clients."""
MIN_ATTEMPT_S = 0.05
"""Smallest remaining time for a further attempt."""


Key = tuple[str, str]


@dataclass
class Entry:
    """One open request."""

    peer: str
    request: ScoreRequest
    came_s: float
    is_abandoned: bool = False
    """Its client is lost, so the verdict is not sent."""


class RequestScheduler:
    """Call `offer` from one task and `work` in `num_workers` tasks. `reply(peer, message)` sends a message and returns
    whether it could."""

    def __init__(
        self,
        pool: Pool,
        settings: RewardSettings,
        reply: Callable[[str, ScoreReply | ScoreRefused], bool],
        on_busy: Callable[[bool], None] = lambda is_busy: None,
    ) -> None:
        """`on_busy` is called when the first lane begins to work and when the last one becomes idle."""
        self._pool, self._settings, self._reply, self._on_busy = pool, settings, reply, on_busy
        self._queue: asyncio.Queue[Entry] = asyncio.Queue(maxsize=settings.max_queue)
        self._open: dict[Key, Entry] = {}
        self._finished: OrderedDict[Key, Verdict] = OrderedDict()
        self._incarnations: dict[str, str] = {}
        self._job_ids = itertools.count(1)
        self._retries_of = settings.retries_of
        self._num_working = 0
        self.is_draining = False
        """New requests are refused."""
        self.tally = Tally()
        self.cache = ScoreCache(0, "", ())
        """Replaced by the server once the scorers are loaded."""

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return self._queue.qsize()

    @property
    def is_full(self) -> bool:
        """Whether the queue has no room, so that `take` waits."""
        return self._queue.full()

    @property
    def num_open(self) -> int:
        """Number of requests that a client waits for: queued or running."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._num_working and self._queue.empty()

    def welcome(self, peer: str, incarnation: str) -> None:
        """Handle a client's Hello. With a new incarnation, its earlier requests are dropped."""
        if self._incarnations.get(peer) != incarnation:
            self.dismiss(peer)
            self._incarnations[peer] = incarnation

    def dismiss(self, peer: str) -> None:
        """Drop the requests of a client that is lost."""
        self._incarnations.pop(peer, None)
        for key in [key for key in self._open if key[0] == peer]:
            self._open.pop(key).is_abandoned = True
        for key in [key for key in self._finished if key[0] == peer]:
            del self._finished[key]

    async def take(self, peer: str, request: ScoreRequest) -> None:
        """Accept a request; waits for room (owner of the wait: the lanes, each bounded by its deadlines)."""
        if not self._is_known(peer, request.request_id):
            await self._queue.put(self._opened(peer, request))

    def offer(self, peer: str, request: ScoreRequest) -> None:
        """Accept a request, or send its client a refusal."""
        if self._is_known(peer, request.request_id):
            return
        if self.is_draining:
            self._refuse(peer, request.request_id, "draining")
        elif self._queue.full():
            self._refuse(peer, request.request_id, "full")
        else:
            self._queue.put_nowait(self._opened(peer, request))

    def refuse_open(self) -> int:
        """Refuse the waiting requests at the end of a drain. Returns their number."""
        refused = list(self._open.items())
        for (peer, request_id), entry in refused:
            entry.is_abandoned = True
            self._refuse(peer, request_id, "draining")
        self._open.clear()
        return len(refused)

    def _is_known(self, peer: str, request_id: str) -> bool:
        """Whether a request is a duplicate: of an open one, which is answered once, or of a finished one, which is
        answered again."""
        key = (peer, request_id)
        verdict = self._finished.get(key)
        if verdict is None and key not in self._open:
            return False
        self.tally.count("duplicates")
        if verdict is not None:
            self._send(peer, request_id, verdict)
        return True

    def _opened(self, peer: str, request: ScoreRequest) -> Entry:
        entry = Entry(peer, request, time.monotonic())
        self._open[peer, request.request_id] = entry
        return entry

    def _refuse(self, peer: str, request_id: str, reason: Literal["full", "draining"]) -> None:
        self.tally.count(f"refused_{reason}")
        self._reply(peer, ScoreRefused(request_id=request_id, reason=reason))

    async def work(self, on_scored: Callable[[Entry, Verdict, float], None]) -> None:
        """Run one lane: score requests one after the other until cancelled. `on_scored` is called with the start
        time.
        """
        while True:
            entry = await self._queue.get()  # nothing is due while there is no request
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
        num_open, num_workers = len(self._open), self._settings.num_workers
        reply = ScoreReply(request_id=request_id, verdict=verdict, num_open=num_open, num_workers=num_workers)
        if not self._reply(peer, reply):
            self.tally.count("undelivered")  # the client resends after a reconnect, and gets the stored verdict

    async def _judge(self, request: ScoreRequest) -> Verdict:
        """The verdict on one request: a cached score, or the result of as many attempts as settings and deadline
        allow.
        """
        started_s = time.monotonic()
        objection = _objection(request)
        if objection:
            return self._verdict(Outcome(job_id=0, kind="invalid", reason=objection), request, 1, 0.0)
        try:
            key = self.cache.key_of(request)
        except _UNFIT as error:
            return self._verdict(_unfit(error), request, 1, 0.0)
        known = self.cache.find(key) if key is not None else None
        if known is not None:
            return self._verdict(known, request, 0, time.monotonic() - started_s)
        outcome, num_attempts = await self._attempts(request, started_s)
        if key is not None:
            self.cache.keep(key, outcome)
        return self._verdict(outcome, request, num_attempts, time.monotonic() - started_s)

    async def _attempts(self, request: ScoreRequest, started_s: float) -> tuple[Outcome, int]:
        num_attempts, left_s = 0, request.deadline_s
        while True:
            job_id = next(self._job_ids)
            job = self._framed(job_id, request)
            if isinstance(job, Outcome):
                return job, max(num_attempts, 1)
            if num_attempts:
                self.tally.count("retries")
            num_attempts += 1
            outcome = await self._pool.attempt(job, job_id, min(self._settings.timeout_s, left_s))
            self.tally.add_attempt(outcome.kind, outcome.scorer, outcome.scorer_s)
            left_s = request.deadline_s - (time.monotonic() - started_s)
            retries = self._retries_of.get(outcome.scorer, self._settings.retries)
            is_final = outcome.kind not in ("timed_out", "crashed")
            if is_final or left_s < MIN_ATTEMPT_S or num_attempts > retries:
                return outcome, num_attempts

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
        except _UNFIT as error:
            return _unfit(error)

    def _verdict(self, outcome: Outcome, request: ScoreRequest, num_attempts: int, wall_s: float) -> Verdict:
        return outcome.verdict(scorer=request.scorer or self._pool.label, num_attempts=num_attempts, wall_s=wall_s)


_UNFIT = (TypeError, ValueError, OverflowError, msgspec.MsgspecError)
"""Exceptions that encoding a row may raise."""


def _unfit(error: Exception) -> Outcome:
    reason = f"the row cannot be passed to a scorer ({error})"[:MAX_REASON_CHARS]
    return Outcome(job_id=0, kind="invalid", reason=reason)


def _objection(request: ScoreRequest) -> str:
    """Why a request cannot be scored; empty if it can."""
    if not (math.isfinite(request.deadline_s) and request.deadline_s > 0):
        return f"deadline_s {request.deadline_s} is not a positive number"
    if len(request.response) > MAX_RESPONSE_CHARS:
        return f"the answer has {len(request.response)} characters, but at most {MAX_RESPONSE_CHARS} are allowed"
    return ""
