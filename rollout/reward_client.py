"""Asks the reward services for verdicts: every question ends with exactly one, whatever happens over there.

Owns: the sockets to the services, questions in flight, choosing a service, moving questions, the total deadline.
Refuses: retrying a verdict (the service does that), judging answers, deciding what a non-score means (the coordinator's
policy).

Loops, one per address (`_Link.run`): waits for a reply, a Welcome or a tick; woken by the socket. Stop: cancelled.
`score` waits for its own future, bounded by `total_deadline_s`; it is owed by the loop of the link it was put on, or,
while no service takes it, by the loop of the first one that does.

A service takes questions while it sends heartbeats, does not drain and is not full (it says so: `ScoreRefused`). Among
those the least loaded is asked: questions of ours, and what it last said it had open for others, per scoring process.

What guarantees the one verdict: the future of a question is resolved once and its deadline always runs. What only saves
time: the choice of a service, resending to one that restarted, moving questions off one that is silent.
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
"""What the service may say to us (heartbeats are the channel's own)."""

OWN_SCORER = ""
"""Scorer name that stands for what the service was configured with."""
OTHERS_S = 5.0
"""What a service said of its other clients is believed for so long."""
FEED = 2
"""Waiting questions sent for each verdict of a service that was full: more than one, or its queue would run dry."""
PROBE = 16
"""The same once a tick, whether or not a verdict came: its room may have been taken by others."""


class _Question:
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
        self.questions: dict[str, _Question] = {}
        """Asked here, and not answered yet."""
        self.is_up = False
        self.is_draining = self.is_full = False
        self._looked_s = 0.0
        self._num_workers, self._num_others, self._others_s = 1, 0, 0.0

    @property
    def takes_questions(self) -> bool:
        """It is worth asking."""
        return self.is_up and not self.is_draining and not self.is_full

    def load(self, now_s: float) -> float:
        """Questions per scoring process over there."""
        num_others = self._num_others if now_s - self._others_s < OTHERS_S else 0
        return (len(self.questions) + num_others) / self._num_workers

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
                log.warning("the reward service at %s ends (%s)", self.name, message.reason)
                self.is_draining = True
                self._client.environments.wake(self)
            elif isinstance(message, Welcome):
                await self._welcomed()
            await self._look_after()

    async def _connected(self) -> bool:
        try:
            await self.peer.connect(timeout_s=self._client.silence_s)
        except DeadlineExceeded:
            log.warning("the reward service at %s does not answer yet", self.name)
            return False
        self.is_up = True
        self._client.environments.wake(self)
        await self._client.feed()
        return True

    async def _welcomed(self) -> None:
        """It restarted, or had forgotten us: it knows nothing of what we asked."""
        log.warning("the reward service at %s restarted; %d requests are sent again", self.name, len(self.questions))
        self._client.count("reward_restarts")
        self.is_draining = self.is_full = False
        self._client.environments.wake(self)
        await self._send_all(lambda question: True)
        await self._client.feed()

    async def _refused(self, message: ScoreRefused) -> None:
        """Full or draining: another one may take the question, or it waits."""
        self.is_draining = self.is_draining or message.reason == "draining"
        self.is_full = self.is_full or message.reason == "full"
        self._client.count(f"score_refused_{message.reason}")
        question = self.questions.pop(message.request_id, None)
        if question is not None:
            await self._client.dispatch(question)

    def _note_load(self, reply: ScoreReply) -> None:
        self.is_full = False
        self._num_workers = max(reply.num_workers, 1)
        self._num_others = max(reply.num_open - len(self.questions) + 1, 0)  # the one it answers is ours still
        self._others_s = self._client.clock.monotonic_s()

    async def _look_after(self) -> None:
        """Every tick: move questions when the address fell silent, ask again what was never answered."""
        now_s, resend_s = self._client.clock.monotonic_s(), self._client.resend_s
        if now_s - self._looked_s < self._client.tick_s:
            return
        self._looked_s, self.is_full = now_s, False
        is_up = self.peer.hub_silence_s <= self._client.patience_s(self)
        if self.is_up and not is_up:
            log.warning("the reward service at %s is silent", self.name)
        if self.is_up != is_up:
            self.is_up = is_up
            self._client.environments.wake(self)
        if is_up:
            await self._client.environments.flush(self)
            await self._send_all(lambda question: now_s - question.sent_s > resend_s)
            await self._client.feed(PROBE)
        else:
            await self._client.take_over(self)

    async def _send_all(self, is_due: Callable[[_Question], bool]) -> None:
        for question in [one for one in self.questions.values() if is_due(one)]:
            self._client.count("score_resent")
            await self._send(question)

    async def ask(self, question: _Question) -> None:
        """Put the question here and send it."""
        question.link = self
        self.questions[question.request.request_id] = question
        await self._send(question)

    async def send(self, message: Message) -> None:
        """As `ServiceLink.send`. What cannot be encoded cannot be sent: the caller has checked it."""
        await self.peer.send(message, timeout_s=self._client.tick_s)

    async def _send(self, question: _Question) -> None:
        """Send; when that fails the question goes again later, unless it can never be sent."""
        question.sent_s = self._client.clock.monotonic_s()
        try:
            await self.peer.send(question.request, timeout_s=self._client.tick_s)
        except (WireError, TypeError, ValueError, NotImplementedError) as error:  # not encodable
            if not question.future.done():
                reason = f"the answer cannot be sent to the reward service: {error}"
                question.future.set_result(Verdict(kind="invalid", reason=reason))
        except OperationError as error:
            question.sent_s = -math.inf
            log.debug("question %s waits: %s", question.request.request_id, error)


class RewardClient:
    """Verdicts from one or several reward services. `run` must be running while `score` is used.

    deadline_s: bound on scoring one answer, sent along. total_deadline_s: from asking to the verdict, a restart of the
    service included. resend_s: ask again when no reply came for this long (it may have been lost; the service knows
    questions by their ids and scores each once). silence_s: a service that sends nothing for this long is given up.
    move_after_s: the same while another one takes questions, since scoring twice is cheaper than waiting.
    max_in_flight: questions out at once; more wait (back-pressure). scorer: what the services are asked for. arrow_of:
    name of a sample on the timeline, empty where it is not drawn. seed: of the run, for environments.
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
        self._questions: dict[str, _Question] = {}
        self._waiting: dict[str, _Question] = {}
        """Those that no service takes just now, oldest first."""
        self._move_after_s = min(move_after_s, silence_s)
        self.silence_s, self.tick_s, self.resend_s = silence_s, tick_s, resend_s
        self.clock: Clock = clock or SystemClock()
        self.counters: dict[str, float] = {}
        self.environments = EnvironmentClient(
            name=name, seed=seed, total_deadline_s=total_deadline_s, tick_s=tick_s, clock=self.clock
        )
        """Episodes in the same services."""
        self.environments.links.extend(self._links)

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
            return Verdict(kind="invalid", reason="no reward service: reward.scorers is empty")
        if len(response) > MAX_RESPONSE_CHARS:
            self.count("verdict_invalid")
            reason = f"the answer has {len(response)} characters, more than {MAX_RESPONSE_CHARS}"
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
        """A verdict came; of several for one question the first counts."""
        question = self._questions.get(reply.request_id)
        if question is None or question.future.done():
            self.count("stray_verdicts")
        else:
            question.future.set_result(reply.verdict)

    def patience_s(self, link: _Link) -> float:
        """How long this address may be silent."""
        has_other = any(other.takes_questions for other in self._links if other is not link)
        return self._move_after_s if has_other else self.silence_s

    async def dispatch(self, question: _Question) -> None:
        """Ask the least loaded service that takes questions; without one it waits."""
        if question.future.done():
            return
        takers = [link for link in self._links if link.takes_questions]
        if takers:
            now_s = self.clock.monotonic_s()
            await min(takers, key=lambda link: link.load(now_s)).ask(question)
        else:
            question.link = None
            self._waiting[question.request.request_id] = question

    async def feed(self, num_most: int | None = None) -> None:
        """Dispatch questions that wait, as long as a service takes them."""
        num_left = len(self._waiting) if num_most is None else num_most
        while self._waiting and num_left > 0 and any(link.takes_questions for link in self._links):
            num_left -= 1
            await self.dispatch(self._waiting.pop(next(iter(self._waiting))))

    async def take_over(self, gone: _Link) -> None:
        """Move the questions of a silent address to those that answer, if any."""
        while gone.questions and any(link.takes_questions for link in self._links):
            _, question = gone.questions.popitem()
            self.count("score_moved")
            await self.dispatch(question)

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
            question = _Question(request, asyncio.get_running_loop().create_future())
            self._questions[request.request_id] = question
            try:
                await self.dispatch(question)
                return await question.future
            finally:
                del self._questions[request.request_id]
                self._waiting.pop(request.request_id, None)
                if question.link is not None:
                    question.link.questions.pop(request.request_id, None)

    def _no_answer(self, started_s: float) -> Verdict:
        waited_s = self.clock.monotonic_s() - started_s
        if any(link.is_up for link in self._links):
            return Verdict(
                kind="crashed", reason=f"no verdict from the reward service in {waited_s:.0f} s", wall_s=waited_s
            )
        return Verdict(kind="crashed", reason=f"reward service unreachable for {waited_s:.0f} s", wall_s=waited_s)
