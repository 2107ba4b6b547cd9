"""Client of the reward services: every request ends with exactly one verdict, whatever happens to the services.

It holds the sockets to the services, chooses a service for each request, moves requests, and enforces the total
deadline. The service retries verdicts. The coordinator's policy decides what a failed verdict means.

One loop per address (`_Link.run`) waits for a reply, a Welcome or a tick, woken by the socket, until cancelled. `score`
waits for its own future, bounded by `total_deadline_s`; the future is resolved by the loop of the link that has the
request, or, while no service accepts it, by the loop of the first one that does.

A service accepts requests while it sends heartbeats, does not drain and is not full (then it sends `ScoreRefused`).
Among these the least loaded is chosen, by our requests plus the requests of others that it last reported, per scoring
process.

One verdict is guaranteed because the future of a request is resolved once and its deadline always runs. The choice of a
service, resending to one that restarted, and moving requests from one that does not respond only save time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence

from areal_like.clock import Clock, SystemClock
from areal_like.errors import DeadlineExceeded, OperationError, WireError
from areal_like.verdict import Verdict
from areal_like.wire.messages import (
    MAX_RESPONSE_CHARS,
    EnvironmentReply,
    Goodbye,
    Message,
    Refused,
    SampleTask,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    Shutdown,
    Welcome,
)
from rollout.environment_client import EnvironmentClient
from rollout.hub_peer import HubPeer

log = logging.getLogger(__name__)

ACCEPT: frozenset[type] = frozenset({Welcome, Refused, ScoreReply, ScoreRefused, EnvironmentReply, Shutdown, Goodbye})
"""Messages of the service (the channel handles heartbeats)."""

OWN_SCORER = ""
"""Scorer name that stands for the service's configured scorers."""
OTHERS_S = 5.0
"""Time for which a service's report of its other clients is used."""
FEED = 2
"""Number of waiting requests sent for each verdict of a service that was full: more than one, or its queue would become
empty."""
PROBE = 16
"""Number of waiting requests sent at each tick, even without a verdict, because other clients may use the free
capacity."""


class _PendingRequest:
    """One request in flight."""

    __slots__ = ("future", "link", "request", "sent_s")

    def __init__(self, request: ScoreRequest, future: asyncio.Future[Verdict]) -> None:
        self.request, self.future = request, future
        self.link: _Link | None = None
        self.sent_s = -math.inf


class _Link:
    """One address of the service."""

    def __init__(self, name: str, peer: HubPeer, client: RewardClient) -> None:
        self.name, self.peer, self._client = name, peer, client
        self.pending: dict[str, _PendingRequest] = {}
        """Requests without a reply."""
        self.is_up = False
        self.is_draining = self.is_full = False
        self._looked_s = 0.0
        self._num_workers, self._num_others, self._others_s = 1, 0, 0.0

    @property
    def accepts_requests(self) -> bool:
        """Whether the service accepts requests."""
        return self.is_up and not self.is_draining and not self.is_full

    def load(self, now_s: float) -> float:
        """Number of requests per scoring process of the service."""
        num_others = self._num_others if now_s - self._others_s < OTHERS_S else 0
        return (len(self.pending) + num_others) / self._num_workers

    async def run(self) -> None:
        """Connect, then resolve replies and resend indefinitely."""
        while not await self._connected():
            pass
        while True:
            message = await self.peer.receive(self._client.tick_s)
            if isinstance(message, ScoreReply):
                self._note_load(message)
                self._client.resolve(message)
                await self._client.feed(FEED)
            elif isinstance(message, ScoreRefused):
                await self._refused(message)
            elif isinstance(message, EnvironmentReply):
                self._client.environments.resolve(message)
            elif isinstance(message, Goodbye):
                log.warning("the reward service at %s is shutting down (%s)", self.name, message.reason)
                self.is_draining = True
                self._client.environments.wake(self)
            elif isinstance(message, Welcome):
                await self._welcomed()
            await self._look_after()

    async def _connected(self) -> bool:
        try:
            await self.peer.connect(timeout_s=self._client.silence_s)
        except DeadlineExceeded:
            log.warning("the reward service at %s does not respond yet", self.name)
            return False
        self.is_up = True
        self._client.environments.wake(self)
        await self._client.feed()
        return True

    async def _welcomed(self) -> None:
        """Resend all requests: the service restarted or has no record of this client."""
        log.warning(
            "registered again with the reward service at %s; %d requests are sent again", self.name, len(self.pending)
        )
        self._client.count("reward_restarts")
        self.is_draining = self.is_full = False
        self._client.environments.wake(self)
        await self._send_all(lambda _: True)
        await self._client.feed()

    async def _refused(self, message: ScoreRefused) -> None:
        """Handle a refusal (full or draining): send the request to another service, or let it wait."""
        self.is_draining = self.is_draining or message.reason == "draining"
        self.is_full = self.is_full or message.reason == "full"
        self._client.count(f"score_refused_{message.reason}")
        pending = self.pending.pop(message.request_id, None)
        if pending is not None:
            await self._client.dispatch(pending)

    def _note_load(self, reply: ScoreReply) -> None:
        self.is_full = False
        self._num_workers = max(reply.num_workers, 1)
        self._num_others = max(
            reply.num_open - len(self.pending) + 1, 0
        )  # the replied request is still counted as ours
        self._others_s = self._client.clock.monotonic_s()

    async def _look_after(self) -> None:
        """At every tick: move requests if the service does not respond, and resend those without a reply."""
        now_s, resend_s = self._client.clock.monotonic_s(), self._client.resend_s
        if now_s - self._looked_s < self._client.tick_s:
            return
        self._looked_s, self.is_full = now_s, False
        is_up = self.peer.hub_silence_s <= self._client.silence_limit_s(self)
        if self.is_up and not is_up:
            log.warning("the reward service at %s is not responding", self.name)
        if self.is_up != is_up:
            self.is_up = is_up
            self._client.environments.wake(self)
        if is_up:
            await self._client.environments.flush(self)
            await self._send_all(lambda pending: now_s - pending.sent_s > resend_s)
            await self._client.feed(PROBE)
        else:
            await self._client.take_over(self)

    async def _send_all(self, is_due: Callable[[_PendingRequest], bool]) -> None:
        for pending in [one for one in self.pending.values() if is_due(one)]:
            self._client.count("score_resent")
            await self._send(pending)

    async def ask(self, pending: _PendingRequest) -> None:
        """Assign the request to this service and send it."""
        pending.link = self
        self.pending[pending.request.request_id] = pending
        await self._send(pending)

    async def send(self, message: Message) -> None:
        """See `ServiceLink.send`. The caller has checked that the message can be encoded."""
        await self.peer.send(message, timeout_s=self._client.tick_s)

    async def _send(self, pending: _PendingRequest) -> None:
        """Send the request; if that fails, it is resent later, unless it can never be sent."""
        pending.sent_s = self._client.clock.monotonic_s()
        try:
            await self.peer.send(pending.request, timeout_s=self._client.tick_s)
        except (WireError, TypeError, ValueError, NotImplementedError) as error:  # not encodable
            if not pending.future.done():
                reason = f"the answer cannot be sent to the reward service: {error}"
                pending.future.set_result(Verdict(kind="invalid", reason=reason))
        except OperationError as error:
            pending.sent_s = -math.inf
            log.debug("request %s waits: %s", pending.request.request_id, error)


class RewardClient:
    """Verdicts from one or several reward services. `run` must be running while `score` is used.

    deadline_s: bound on scoring one answer, part of the request. total_deadline_s: from the request to the verdict,
    including a restart of the service. resend_s: resend a request without a reply after this time (it may have been
    lost; the service identifies requests by id and scores each once). silence_s: a service that sends nothing for this
    long counts as lost. move_after_s: the same while another service accepts requests, since scoring twice is cheaper
    than waiting. max_in_flight: number of requests sent at once; further ones wait (back-pressure). scorer: name of the
    requested scorer. arrow_of: name of a sample on the timeline, empty if it is not drawn. seed: the run's seed, for
    environments.
    """

    def __init__(
        self,
        peers: Sequence[HubPeer],
        *,
        name: str,
        deadline_s: float,
        total_deadline_s: float,
        silence_s: float = 15.0,
        move_after_s: float = 3.0,
        resend_s: float = 30.0,
        tick_s: float = 1.0,
        max_in_flight: int = 1024,
        scorer: str = OWN_SCORER,
        clock: Clock | None = None,
        arrow_of: Callable[[SampleTask], str] = lambda task: "",
        seed: int = 0,
    ) -> None:
        self._links = [_Link(f"{name}->reward{index}", peer, self) for index, peer in enumerate(peers)]
        self._ids = itertools.count()
        self._name, self._scorer, self._arrow_of = name, scorer, arrow_of
        self._deadline_s, self._total_deadline_s = deadline_s, total_deadline_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self._pending: dict[str, _PendingRequest] = {}
        self._waiting: dict[str, _PendingRequest] = {}
        """Requests that no service accepts at the moment, oldest first."""
        self._move_after_s = min(move_after_s, silence_s)
        self.silence_s, self.tick_s, self.resend_s = silence_s, tick_s, resend_s
        self.clock: Clock = clock or SystemClock()
        self.counters: dict[str, float] = {}
        self.environments = EnvironmentClient(
            name=name, seed=seed, total_deadline_s=total_deadline_s, tick_s=tick_s, clock=self.clock
        )
        """Client for episodes in the same services."""
        self.environments.links.extend(self._links)

    @property
    def num_outstanding(self) -> int:
        """Number of requests without a verdict."""
        return len(self._pending)

    def count(self, name: str) -> None:
        """Add one to a counter."""
        self.counters[name] = self.counters.get(name, 0.0) + 1.0

    async def run(self) -> None:
        """Serve all addresses until cancelled by the worker. Raises ChannelError if a service refuses the
        connection.
        """
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run(), name=link.name)

    async def close(self) -> None:
        """Close the connections to all services."""
        for link in self._links:
            await link.peer.close("worker ends")

    async def score(self, task: SampleTask, response: str, finish_reason: str, num_tokens: int) -> Verdict:
        """The verdict on one answer: the service's, or `invalid` / `crashed` with the reason why there is none."""
        if not self._links:
            return Verdict(kind="invalid", reason="there is no reward service, because reward.scorers is empty")
        if len(response) > MAX_RESPONSE_CHARS:
            self.count("verdict_invalid")
            reason = f"the answer has {len(response)} characters, but at most {MAX_RESPONSE_CHARS} are allowed"
            return Verdict(kind="invalid", reason=reason)
        started_s = self.clock.monotonic_s()
        request = self._request(task, response, finish_reason, num_tokens)
        try:
            async with asyncio.timeout(self._total_deadline_s):
                verdict = await self._ask(request)
        except TimeoutError:
            verdict = self._no_answer(started_s)
        self.count(f"verdict_{verdict.kind}")
        return verdict

    def resolve(self, reply: ScoreReply) -> None:
        """Deliver a verdict; of several for one request the first counts."""
        pending = self._pending.get(reply.request_id)
        if pending is None or pending.future.done():
            self.count("stray_verdicts")
        else:
            pending.future.set_result(reply.verdict)

    def silence_limit_s(self, link: _Link) -> float:
        """Time for which this service may send nothing."""
        has_other = any(other.accepts_requests for other in self._links if other is not link)
        return self._move_after_s if has_other else self.silence_s

    async def dispatch(self, pending: _PendingRequest) -> None:
        """Send the request to the least loaded service that accepts requests; without one it waits."""
        if pending.future.done():
            return
        takers = [link for link in self._links if link.accepts_requests]
        if takers:
            now_s = self.clock.monotonic_s()
            await min(takers, key=lambda link: link.load(now_s)).ask(pending)
        else:
            pending.link = None
            self._waiting[pending.request.request_id] = pending

    async def feed(self, num_most: int | None = None) -> None:
        """Dispatch waiting requests, as long as a service accepts them."""
        num_left = len(self._waiting) if num_most is None else num_most
        while self._waiting and num_left > 0 and any(link.accepts_requests for link in self._links):
            num_left -= 1
            await self.dispatch(self._waiting.pop(next(iter(self._waiting))))

    async def take_over(self, gone: _Link) -> None:
        """Move the requests of a service that does not respond to others, if any."""
        while gone.pending and any(link.accepts_requests for link in self._links):
            _, pending = gone.pending.popitem()
            self.count("score_moved")
            await self.dispatch(pending)

    # ------------------------------------------------------------ inside

    def _request(self, task: SampleTask, response: str, finish_reason: str, num_tokens: int) -> ScoreRequest:
        return ScoreRequest(
            request_id=f"{self._name}:{next(self._ids)}",
            scorer=self._scorer,
            row=task.row,
            response=response,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            deadline_s=self._deadline_s,
            arrow=self._arrow_of(task),
        )

    async def _ask(self, request: ScoreRequest) -> Verdict:
        async with self._slots:
            pending = _PendingRequest(request, asyncio.get_running_loop().create_future())
            self._pending[request.request_id] = pending
            try:
                await self.dispatch(pending)
                return await pending.future
            finally:
                del self._pending[request.request_id]
                self._waiting.pop(request.request_id, None)
                if pending.link is not None:
                    pending.link.pending.pop(request.request_id, None)

    def _no_answer(self, started_s: float) -> Verdict:
        waited_s = self.clock.monotonic_s() - started_s
        if any(link.is_up for link in self._links):
            return Verdict(
                kind="crashed",
                reason=f"the reward service did not return a verdict within {waited_s:.0f} s",
                wall_s=waited_s,
            )
        return Verdict(
            kind="crashed", reason=f"the reward service was unreachable for {waited_s:.0f} s", wall_s=waited_s
        )
