"""The rollout worker: takes leases from the controller, has each sample made by the workflow, and reports the results.

It holds the connection to the controller, the loops below and the heartbeat, and shuts down. The samples' tasks are in
pool.py, versions in weights/versions.py.

Loops: all are tasks of one TaskGroup on one asyncio loop; if one fails, the process ends:

    loop        waits for                          woken by                     produces
    receive     a message of the controller        the socket                   sample tasks, announcements, acks
    samples     (pool: one task per lease)         versions loop                SampleFinished into the book,
                the version, then the engine,      engine                       or SampleReturned into the outbox
                then the verdict,                  rewards loop
                then a teacher if there is one     its engine
    versions    an announcement                    receive                      swaps, VersionLoaded or VersionFailed
    progress    `progress_s` to pass               the clock                    Progress: new tokens of running leases
    send        work to send, or `TICK_S`          samples, versions, acks      outbox, incidents inside the engine,
                                                                                and finished samples until acked
    rewards     replies of the reward service      the sockets                  verdicts (`reward_client`)
    watch       `heartbeat_s` to pass              the clock                    the end, when the controller is silent
    (body)      Shutdown, SIGTERM                  receive, the process         shutdown: return leases, flush, Goodbye

No token of a lease is reported twice or left out: reports have absolute answer positions, and a report is composed and
sent with one lock held, so a returned lease starts where its last report ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext

from areal_like.clock import Clock, SystemClock
from areal_like.config import ProcessSpec
from areal_like.errors import DeadlineExceeded, OperationError, UserError
from areal_like.process import freeze_heap
from areal_like.red_team import RedTeamJudge
from areal_like.safety import SafetyFilter
from areal_like.trace import Tracer
from areal_like.wire.messages import (
    AnnounceVersion,
    CancelLeases,
    Draining,
    Goodbye,
    Heartbeat,
    Incident,
    Lease,
    Message,
    Progress,
    RecallLeases,
    Refused,
    ReleaseMemory,
    SampleAck,
    Shutdown,
    SwapVersion,
    Welcome,
)
from rollout.config import Interruption, RolloutSettings
from rollout.engine.port import Engine
from rollout.hub_peer import HubPeer
from rollout.incidents import Incidents
from rollout.leases import LeaseBook
from rollout.models.hosting import ModelHosts
from rollout.policy_access import PoolPolicy
from rollout.pool import SamplePool
from rollout.reward_client import RewardClient
from rollout.sample_context import SampleContext
from rollout.tokens import PromptTokens
from rollout.weights.port import Receiver
from rollout.weights.versions import VersionGate, VersionLoader
from rollout.workflow import ServingWorkflow, Workflow

log = logging.getLogger(__name__)

ACCEPT: frozenset[type] = frozenset(
    {
        Welcome, Refused, Shutdown, Goodbye, Lease, SampleAck, CancelLeases, RecallLeases, AnnounceVersion, SwapVersion,
        ReleaseMemory,
    }
)  # fmt: skip
"""Messages of the controller (the channel handles heartbeats)."""

RESEND_S = 10.0
"""A finished sample not acknowledged for this long is sent again."""
TICK_S = 0.5
CONNECT_S = 60.0
CLOSE_S = 5.0
SIGTERM_DEADLINE_S = 10.0
"""Time for the shutdown after SIGTERM; a Shutdown message has its own deadline."""

PeerFactory = Callable[[int, Callable[[], Heartbeat]], HubPeer]
"""Function that creates the connection to the controller from the worker's capacity and its heartbeat."""


def interruption_of(spec: ProcessSpec, settings: RolloutSettings) -> Interruption:
    """Handling of running answers at a new version: one-step-off finishes a batch with the version that it began
    with.
    """
    return "drain" if spec.mode == "one_step_off" else settings.interruption


class RolloutWorker:
    """One rollout worker over an engine, a workflow and two connections. Call `run` once."""

    def __init__(
        self,
        spec: ProcessSpec,
        settings: RolloutSettings,
        *,
        engine: Engine,
        tokens: PromptTokens,
        workflow: Workflow,
        rewards: RewardClient,
        make_peer: PeerFactory,
        tracer: Tracer,
        receiver: Receiver | None = None,
        incidents: Incidents | None = None,
        clock: Clock | None = None,
        models: ModelHosts | None = None,
        resend_s: float = RESEND_S,
    ) -> None:
        self._spec, self._settings = spec, settings
        self._engine, self._workflow, self._rewards = engine, workflow, rewards
        self._make_peer, self._resend_s = make_peer, resend_s
        self._clock = clock or SystemClock()
        gate, self._models = VersionGate(), models or ModelHosts()
        self._bench = SampleContext(
            engine=engine,
            gate=gate,
            tokens=tokens,
            rewards=rewards,
            version_deadline_s=spec.staleness.group_timeout_s,
            clock=self._clock,
            tracer=tracer,
            models=self._models,
            safety=SafetyFilter(settings.safety, "rollout.safety") if settings.safety else None,
            red_team=RedTeamJudge(settings.red_team),
        )
        self._loader = VersionLoader(
            engine=engine,
            gate=gate,
            interruption=interruption_of(spec, settings),
            report=self._post,
            park_all=self._park_all,
            doing=self._bench.doing,
            tracer=tracer,
            receiver=receiver,
            on_swapped=self._models.policy_loaded if self._models.hosts else None,
        )
        self._receiver = receiver
        self._incidents = incidents or Incidents()
        self._outbox: deque[Message] = deque()
        self._send_wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._reported = asyncio.Event()
        self._shutdown = ("asked to stop", SIGTERM_DEADLINE_S)
        self._is_leaving = False
        self._counters: dict[str, float] = {"samples": 0.0}
        self._last_paused_s = 0.0
        self._book = LeaseBook(0)

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        """Work until shutdown is requested. Raises EngineError, ChannelError or DeadlineExceeded if one of them ends
        the worker."""
        await self._engine.start()
        await self._models.start()
        can = self._engine.capabilities
        interruption = interruption_of(self._spec, self._settings)
        if interruption not in can.interruptions:
            remedy = f"choose one of {', '.join(can.interruptions)}"
            raise UserError(
                f"this engine does not support `{interruption}`", where="rollout.interruption", remedy=remedy
            )
        self._bench.tokens.limit_context(can.max_context)
        self._book = LeaseBook(self._settings.capacity_of(can.num_slots))
        self._peer = self._make_peer(self._book.capacity, self.status)
        closings = {"rewards": self._rewards.close, "engine": self._engine.close, "models": self._models.close}
        if self._receiver is not None:
            closings["receiver"] = self._receiver.close
        try:
            await self._peer.connect(timeout_s=CONNECT_S)
            freeze_heap()
            self._bench.doing.ready()
            log.info("connected to the controller; capacity: %d samples", self._book.capacity)
            await self._work(stop)
            closings = {"peer": lambda: self._peer.close(self._shutdown[0]), **closings}
        except BaseExceptionGroup as group:
            raise _first_cause(group) from None
        finally:
            self._bench.doing.close()
            await _close(closings)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            self._pool = SamplePool(
                self._book,
                self._bench,
                self._workflow,
                group=group,
                post=self._post,
                on_finished=self._send_wake.set,
                counters=self._counters,
            )
            await stack.enter_async_context(self._serving())
            loops = [
                group.create_task(loop(), name=f"worker:{loop.__qualname__}")
                for loop in (
                    self._receive_loop,
                    self._loader.run,
                    self._progress_loop,
                    self._send_loop,
                    self._rewards.run,
                    self._watch_loop,
                )
            ]
            await _first_of(stop, self._reported)
            await self._leave(*self._shutdown)
            self._pool.cancel_all()
            for loop in loops:
                loop.cancel()

    def _serving(self) -> AbstractAsyncContextManager[None]:
        if not isinstance(self._workflow, ServingWorkflow):
            return nullcontext()
        return self._workflow.serving(PoolPolicy(self._spec, self._bench, self._pool, self._incidents.add))

    async def _leave(self, reason: str, deadline_s: float) -> None:
        """Return unfinished leases, wait briefly for verdicts, and send finished samples until they are acknowledged.

        The controller is notified first, because it would otherwise lease the returned samples to this worker again.
        """
        log.info("the worker exits within %.0f s (%s)", deadline_s, reason)
        self._is_leaving = self._pool.is_closed = True
        self._post(Draining(reason=reason))
        await self._pool.hand_back_all(ending_too=False)
        await self._pool.settle(0.4 * deadline_s)
        await self._pool.hand_back_all(ending_too=True)
        try:
            async with asyncio.timeout(0.4 * deadline_s):
                while self._outbox or self._book.unacked:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            log.warning(
                "the worker exits with %d finished samples that the controller has not acknowledged",
                len(self._book.unacked),
            )

    # ------------------------------------------------------------ loops

    async def _receive_loop(self) -> None:
        while True:
            message = await self._peer.receive(TICK_S)
            if message is not None:
                await self._handle(message)

    async def _handle(self, message: Message) -> None:
        match message:
            case Lease():
                for task in message.tasks:
                    self._pool.take(task)
                self._send_wake.set()
            case SampleAck():
                self._book.ack(message.lease_ids)
                self._settled.set()
            case CancelLeases():
                self._pool.cancel(message.lease_ids)
                self._settled.set()
            case RecallLeases():
                await self._pool.recall(message.lease_ids)
            case AnnounceVersion():
                self._loader.announce(message)
            case SwapVersion():
                self._loader.swap(message)
            case ReleaseMemory():
                self._loader.release(message.number)
            case Shutdown():
                self._shutdown = (message.reason, message.deadline_s)
                self._reported.set()
            case Goodbye():
                self._shutdown = (f"the controller left ({message.reason})", SIGTERM_DEADLINE_S)
                self._reported.set()
            case Welcome():
                await self._on_reregistered()
            case _:
                log.warning("ignoring an unexpected message of type %s", type(message).__name__)

    async def _on_reregistered(self) -> None:
        """Handle a new registration: the controller had declared this worker lost, and its samples continue on other
        workers from their reported tokens.

        Answers that only wait for their verdict are kept, and finished samples are sent again, because the controller
        accepts late ones.
        """
        log.warning("the controller considered this worker lost, and has registered it again")
        self._count("given_up")
        self._pool.abandon_unfinished()
        self._book.send_again()
        self._loader.report_again()
        self._send_wake.set()

    async def _progress_loop(self) -> None:
        while True:
            await asyncio.sleep(self._settings.progress_s)
            async with self._pool.report_lock:
                items = self._book.progress(self._engine.progress())
                if items and await self._sent(Progress(items=items)):
                    self._book.mark(items)

    async def _send_loop(self) -> None:
        """Send the outbox in order, then finished samples; messages that cannot be sent now stay for the next round."""
        while True:
            try:
                async with asyncio.timeout(min(TICK_S, self._resend_s)):
                    await self._send_wake.wait()
            except TimeoutError:
                pass
            self._send_wake.clear()
            self._outbox.extend(Incident(text=text) for text in self._incidents.take())
            while self._outbox and await self._sent(self._outbox[0]):
                self._outbox.popleft()
            for message in self._book.due(self._clock.monotonic_s(), self._resend_s):
                if message.lease_id not in self._book.unacked:  # acknowledged or cancelled while others were sent
                    continue
                is_again = self._book.was_sent(message.lease_id)
                if not await self._sent(message):
                    break
                self._book.sent(message.lease_id, self._clock.monotonic_s())
                self._count("resent" if is_again else "sent_finished")
            self._settled.set()

    async def _watch_loop(self) -> None:
        """End the worker when the controller is lost. Its silence counts only while this process listened
        (channel.Peer)."""
        while True:
            await asyncio.sleep(self._spec.heartbeat_s)
            if not self._is_leaving and self._peer.hub_silence_s > self._spec.controller_silence_s:
                raise DeadlineExceeded("a message", "the controller", self._spec.controller_silence_s)

    # ------------------------------------------------------------ small parts

    def _park_all(self) -> None:
        self._pool.park_all()

    def _post(self, message: Message) -> None:
        """Add a message to the outbox, which is bounded by the leases held, by one report per announced version, and by
        incidents held."""
        self._outbox.append(message)
        self._send_wake.set()

    async def _sent(self, message: Message) -> bool:
        """Send a message; returns whether it was sent. The watch loop handles a controller that does not accept
        messages."""
        try:
            await self._peer.send(message, timeout_s=self._spec.controller_silence_s)
        except OperationError as error:
            self._count("send_failures")
            log.warning("a message of type %s was not sent: %s", type(message).__name__, error)
            return False
        return True

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + 1.0

    # ------------------------------------------------------------ heartbeat

    def status(self) -> Heartbeat:
        """The current state, and monotonic counters."""
        counters = {
            **self._engine.counters(),
            **self._counters,
            "cpu_s": time.process_time(),
            "incidents": float(self._incidents.count),
            "version_waits": float(self._bench.version_waits),
            "version_wait_s": self._bench.version_wait_s,
            "score_wait_s": self._bench.score_wait_s,
            **self._bench.doing.counters(),
            **self._loader.counters(),
            **{f"reward_{name}": value for name, value in self._rewards.counters.items()},
            **self._rewards.environments.counters,
            **self._models.counters(),
            **(self._workflow.traffic_counters() if isinstance(self._workflow, ServingWorkflow) else {}),
        }
        return Heartbeat(state=self._state(counters.get("paused_s", 0.0)), counters=counters)

    def _state(self, paused_s: float) -> str:
        is_pausing, self._last_paused_s = paused_s > self._last_paused_s, paused_s
        if self._bench.doing.is_loading and is_pausing:
            return "paused"
        return self._bench.doing.state


async def _close(closings: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Free all resources; a failure here must not hide the error that ended the worker. A worker that failed sends no
    Goodbye, which would report a graceful end, after which it is not restarted.
    """
    for name, closing in closings.items():
        try:
            async with asyncio.timeout(CLOSE_S):
                await closing()
        except Exception as error:  # the process ends anyway; the important error was raised before
            log.warning("closing the %s failed: %s: %s", name, type(error).__name__, error)


async def _first_of(*events: asyncio.Event) -> None:
    """Return when any of the events is set. There is no deadline, because a worker serves until it is stopped."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real exception in a group of groups."""
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause
