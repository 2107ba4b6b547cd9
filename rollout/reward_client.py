"""Asks the reward service for verdicts: every question ends with exactly one, whatever happens over there.

Owns: the sockets to the reward service, questions in flight, resending, the total deadline. Refuses: retrying a
verdict (the service does that), judging answers, deciding what a non-score means (the coordinator's policy).

Loops, one per address (`_Link.run`): waits for a reply, a Welcome or a tick; woken by the socket. Stop: cancelled.
`score` waits for its own future, owed by the loop of the link it was put on, bounded by `total_deadline_s`.

What guarantees the one verdict: the future of a question is resolved once and its deadline always runs. What only saves
time: least outstanding link, resending to a service that restarted, moving questions off a silent link.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from areal_like.clock import Clock, SystemClock
from areal_like.errors import DeadlineExceeded, OperationError, WireError
from areal_like.messages import Goodbye, Message, Refused, SampleTask, ScoreReply, ScoreRequest, Shutdown, Welcome
from areal_like.verdict import Verdict

log = logging.getLogger(__name__)

ACCEPT: frozenset[type] = frozenset({Welcome, Refused, ScoreReply, Shutdown, Goodbye})
"""What the service may say to us (heartbeats are the channel's own)."""

OWN_SCORER = ""
"""Scorer name that stands for what the service was configured with."""


class HubPeer(Protocol):
    """The part of `areal_like.channel.Peer` that this wing uses."""

    @property
    def hub_silence_s(self) -> float: ...

    async def connect(self, timeout_s: float) -> Welcome: ...

    async def receive(self, timeout_s: float) -> Message | None: ...

    async def send(self, message: Message, timeout_s: float = 30.0) -> None: ...

    async def close(self, reason: str = "") -> None: ...


class _Question:
    """One request in flight."""

    __slots__ = ("future", "link", "request", "sent_s")

    def __init__(self, request: ScoreRequest, future: asyncio.Future[Verdict]) -> None:
        self.request, self.future = request, future
        self.link: _Link | None = None
        self.sent_s: float | None = None


class _Link:
    """One address of the service."""

    def __init__(self, name: str, peer: HubPeer, client: RewardClient) -> None:
        self.name, self.peer, self._client = name, peer, client
        self.questions: dict[str, _Question] = {}
        self.is_up = False
        self._looked_s = 0.0

    async def run(self) -> None:
        """Connect, then resolve replies and resend for ever."""
        while not await self._connected():
            pass
        while True:
            message = await self.peer.receive(self._client.tick_s)
            if isinstance(message, ScoreReply):
                self._client.resolve(message)
            elif isinstance(message, Welcome):
                log.warning(
                    "the reward service at %s started anew; %d questions go again", self.name, len(self.questions)
                )
                self._client.count("reward_restarts")
                await self._send_all(lambda question: True)
            await self._look_after()

    async def _connected(self) -> bool:
        try:
            await self.peer.connect(timeout_s=self._client.silence_s)
        except DeadlineExceeded:
            log.warning("the reward service at %s does not answer yet", self.name)
            self._client.hand_over(self)
            return False
        self.is_up = True
        await self._send_all(lambda question: True)
        return True

    async def _look_after(self) -> None:
        """Every tick: hand questions over when the address fell silent, ask again what was never answered."""
        now_s, resend_s = self._client.clock.monotonic_s(), self._client.resend_s
        if now_s - self._looked_s < self._client.tick_s:
            return
        self._looked_s = now_s
        is_up = self.peer.hub_silence_s <= self._client.silence_s
        if self.is_up and not is_up:
            log.warning("the reward service at %s is silent", self.name)
            self._client.hand_over(self)
        self.is_up = is_up
        if is_up:
            await self._send_all(lambda question: question.sent_s is None or now_s - question.sent_s > resend_s)

    async def _send_all(self, is_due: Callable[[_Question], bool]) -> None:
        for question in [one for one in self.questions.values() if is_due(one)]:
            if question.sent_s is not None:
                self._client.count("score_resent")
            await self.send(question)

    async def send(self, question: _Question) -> None:
        """Send; when that fails the question stays and goes again later, unless it can never be sent."""
        question.sent_s = self._client.clock.monotonic_s()
        try:
            await self.peer.send(question.request, timeout_s=self._client.tick_s)
        except (WireError, TypeError, ValueError, NotImplementedError) as error:  # not encodable
            if not question.future.done():
                reason = f"the answer cannot be sent to the reward service: {error}"
                question.future.set_result(Verdict(kind="invalid", reason=reason))
        except OperationError as error:
            question.sent_s = None
            log.debug("question %s waits: %s", question.request.request_id, error)


class RewardClient:
    """Verdicts from one or several reward services. `run` must be running while `score` is used.

    deadline_s: bound on scoring one answer, sent along. total_deadline_s: from asking to the verdict, a restart of the
    service included. resend_s: ask again when no reply came for this long (it may have been lost; the service knows
    questions by their ids and scores each once). max_in_flight: questions out at once; more wait (back-pressure).
    arrow_of: name of a sample on the timeline, empty where it is not drawn.
    """

    def __init__(
        self,
        peers: Sequence[HubPeer],
        *,
        name: str,
        deadline_s: float,
        total_deadline_s: float,
        silence_s: float = 15.0,
        resend_s: float = 30.0,
        tick_s: float = 1.0,
        max_in_flight: int = 1024,
        clock: Clock | None = None,
        arrow_of: Callable[[SampleTask], str] = lambda task: "",
    ) -> None:
        self._links = [_Link(f"{name}->reward{index}", peer, self) for index, peer in enumerate(peers)]
        self._ids = itertools.count()
        self._name, self._arrow_of = name, arrow_of
        self._deadline_s, self._total_deadline_s = deadline_s, total_deadline_s
        self._slots = asyncio.Semaphore(max_in_flight)
        self._questions: dict[str, _Question] = {}
        self.silence_s, self.tick_s, self.resend_s = silence_s, tick_s, resend_s
        self.clock: Clock = clock or SystemClock()
        self.counters: dict[str, float] = {}

    @property
    def num_outstanding(self) -> int:
        """Questions without a verdict yet."""
        return len(self._questions)

    def count(self, name: str) -> None:
        """Add one to a counter."""
        self.counters[name] = self.counters.get(name, 0.0) + 1.0

    async def run(self) -> None:
        """Serve all addresses. Stop: cancelled by the worker. Raises ChannelError when a service refuses us."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run(), name=link.name)

    async def close(self) -> None:
        """Say goodbye to every address."""
        for link in self._links:
            await link.peer.close("worker ends")

    async def score(self, task: SampleTask, response: str, finish_reason: str, num_tokens: int) -> Verdict:
        """The verdict on one answer: the service's, or `invalid` / `crashed` saying why there is none."""
        if not self._links:
            return Verdict(kind="invalid", reason="no reward service")
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
        """A verdict came; of several for one question the first counts."""
        question = self._questions.get(reply.request_id)
        if question is None or question.future.done():
            self.count("stray_verdicts")
        else:
            question.future.set_result(reply.verdict)

    def hand_over(self, gone: _Link) -> None:
        """Move the questions of a silent address to those that answer, if any."""
        if not any(link.is_up for link in self._links if link is not gone):
            return
        for question in list(gone.questions.values()):
            del gone.questions[question.request.request_id]
            self._place(question, exclude=gone)

    # ------------------------------------------------------------ inside

    def _request(self, task: SampleTask, response: str, finish_reason: str, num_tokens: int) -> ScoreRequest:
        return ScoreRequest(
            request_id=f"{self._name}:{next(self._ids)}",
            scorer=OWN_SCORER,
            row=task.row,
            response=response,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            deadline_s=self._deadline_s,
            arrow=self._arrow_of(task),
        )

    async def _ask(self, request: ScoreRequest) -> Verdict:
        async with self._slots:
            question = _Question(request, asyncio.get_running_loop().create_future())
            self._questions[request.request_id] = question
            try:
                link = self._place(question)
                if link.is_up:
                    await link.send(question)
                return await question.future
            finally:
                del self._questions[request.request_id]
                if question.link is not None:
                    question.link.questions.pop(request.request_id, None)

    def _place(self, question: _Question, exclude: _Link | None = None) -> _Link:
        """Put a question on the least busy address that answers, or on any; `_look_after` sends what was not sent."""
        links = [link for link in self._links if link is not exclude] or self._links
        link = min(links, key=lambda one: (not one.is_up, len(one.questions)))
        question.link, question.sent_s = link, None
        link.questions[question.request.request_id] = question
        return link

    def _no_answer(self, started_s: float) -> Verdict:
        waited_s = self.clock.monotonic_s() - started_s
        if any(link.is_up for link in self._links):
            return Verdict(
                kind="crashed", reason=f"no verdict from the reward service in {waited_s:.0f} s", wall_s=waited_s
            )
        return Verdict(kind="crashed", reason=f"reward service unreachable for {waited_s:.0f} s", wall_s=waited_s)
