"""The thin asyncio and ZeroMQ shell around the pure coordinator.

Owns: bursts of messages as one ledger transaction and then sends, the clock, stop and farewell. Refuses: decisions
about samples (coordinator.py), what a message means (inbound.py), how one is made (outbound.py), process life
(supervisor.py), what is shown and written down (telemetry/).

Map of the loops (all in one TaskGroup, all end with `_over`): _receive   waits for the hub (at most RECEIVE_S); its
waker is any process of the run. Handles messages in bursts: one ledger transaction for the burst, then the sends (an
acknowledgement never precedes its commit, `exactly-once`). _tick      every TICK_S: a stop asked for, processes
(supervisor), deadlines (coordinator Tick), watchdog, display. (restart)  one task for each loss of the trainer,
started by _tick, which goes on: waits for its ranks to be gone and for a thread that reads checkpoints, both with
deadlines of their own; then tells the coordinator. The end sets `_over`: the coordinator's EndRun, a
fatal error, a second signal.

After a refused write the coordinator knows more than the ledger: from then on nothing is handled any more, or a resumed
run would find facts whose causes are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_like.errors import OperationError, UserError
from areal_like.process import first_cause
from areal_like.trace import Tracer
from areal_like.transport.channel import Hub
from areal_like.wire import messages as m
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import (
    DropGroup,
    Effect,
    EndRun,
    EndWorker,
    EvalDone,
    EvalDropped,
    Note,
    PurgePayloads,
    RecordIncident,
    SendAck,
    SendBatch,
    SendCancel,
    SendLeases,
    SendNoMoreBatches,
    SendRecall,
    SendRelease,
    SendRewrite,
    SendSwap,
    SendVersion,
)
from controller.coordinator.events import Event, StopRequested, Tick, TrainerLost, WorkerEnded, WorkerJoined, WorkerLost
from controller.coordinator.notes import HANDLING
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.runtime.inbound import SPEAKERS, InboundEvent, entry_of, translate
from controller.runtime.monitor import Monitor
from controller.runtime.outbound import Outgoing, Rows, TaskSettings
from controller.runtime.outcome import Outcome, StoppedAtOnce
from controller.runtime.supervisor import Loss, Supervisor
from controller.runtime.trainer_restart import TrainerRestart
from controller.runtime.watchdog import Watchdog
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.sinks import Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.step_reporter import StepReporter
from controller.telemetry.summary import Tally

log = logging.getLogger(__name__)

RECEIVE_S = 0.2
TICK_S = 0.2
BURST = 256
"""Messages handled before their ledger transaction is committed: bounds the delay of an acknowledgement."""


@dataclass(frozen=True)
class ServerSettings:
    """The few facts that the shell itself needs; times in seconds."""

    tasks: TaskSettings
    num_steps: int
    stop_on_long_prompt: bool
    stall_after_s: float
    stop_grace_s: float


class Server:
    """Runs one job until it is over. `run` returns the outcome; nothing of the run is lost whatever it is."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        coordinator: Coordinator,
        ledger: Ledger,
        hub: Hub,
        supervisor: Supervisor,
        crew: WorkerAdmin,
        trainer_restart: TrainerRestart,
        rows: Rows,
        display: Display,
        tally: Tally,
        journal: Journal,
        status: StatusFile,
        sinks: Sinks,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._coordinator, self._ledger = settings, coordinator, ledger
        self._hub, self._supervisor, self._crew = hub, supervisor, crew
        self._trainer_restart = trainer_restart
        self._display, self._tally, self._journal, self._tracer = display, tally, journal, tracer
        self._clock, self._started_s = clock, clock()
        self._steps = StepReporter(tally, display, journal, num_steps=settings.num_steps, clock=clock)
        self._monitor = Monitor(
            coordinator, supervisor, hub,
            tally=tally, steps=self._steps, display=display, journal=journal, status=status, sinks=sinks,
            clock=clock,
        )  # fmt: skip
        self._watchdog = Watchdog(
            stall_after_s=settings.stall_after_s, stop_grace_s=settings.stop_grace_s, now_s=self._started_s
        )
        self._out = Outgoing(
            hub, ledger, rows, settings.tasks,
            is_live=coordinator.is_live,
            on_unreachable=lambda name: supervisor.lost_touch(name, clock()),
        )  # fmt: skip
        self._over = asyncio.Event()
        self._outcome: Outcome | None = None
        self._stop_reason = ""
        self._is_stop_sent = False
        self._roles: dict[str, m.Role] = {}
        self._is_unsettled = False
        """The coordinator has taken in what the ledger has not: between the two, and indefinitely once a write
        failed.
        """
        self._last_step: int | None = None
        """Passed to the trainer with NoMoreBatches."""
        self._saved_version = -1
        self._restart: asyncio.Task[None] | None = None
        """Of the trainer: under way, or over."""
        self._death: OperationError | None = None
        """The last process that is lost and not restarted."""
        self._diverged: set[str] = set()
        """Rollout workers that ended because the policy has diverged, and have finished no sample since."""
        self.is_hurried = False
        """The user wants it over now: no wait for anybody."""

    @property
    def saved_version(self) -> int:
        """Version of the newest checkpoint that was reported; -1: none yet."""
        return self._saved_version

    # ------------------------------------------------------------ life

    async def run(self, first_events: Sequence[Event]) -> Outcome:
        """Serve until the run is over. `first_events` bring the coordinator to life (RunStarted, ...)."""
        try:
            self._handle([InboundEvent(event) for event in first_events])
            async with asyncio.TaskGroup() as self._group:
                loops = [self._group.create_task(self._receive()), self._group.create_task(self._tick())]
                await self._over.wait()  # _tick's watchdog is the deadline
                for loop in [*loops, self._restart] if self._restart else loops:
                    loop.cancel()
        except* (UserError, OperationError, OSError) as errors:
            self._outcome = Outcome.of(first_cause(errors))
        assert self._outcome is not None
        return self._outcome

    def request_stop(self, reason: str) -> None:
        """First call: finish the running step, save, end. Second call, or one after the end: no more waiting.

        Called by a signal at any time, so it only leaves word: `_tick` carries it out.
        """
        if self._outcome is not None:
            self.is_hurried = True
        elif not self._stop_reason:
            self._stop_reason = reason
            self._display.note(
                f"{reason}: finishing the running step and saving (repeat to stop immediately)", "warning"
            )
        else:
            self.is_hurried = True
            self._end(Outcome("stopped", f"{reason} twice: stopped at once", StoppedAtOnce()))

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._over.set()

    async def farewell(self, grace_s: float) -> None:
        """Tell every process to end; what they have finished meanwhile is still recorded."""
        deadline_s = self._clock() + grace_s
        with contextlib.suppress(OSError):  # a full disk is why the run ends
            self._monitor.last()
        for name in list(self._hub.peers):
            self._dismiss(name, grace_s)
        while not self.is_hurried and (left_s := deadline_s - self._clock()) > 0 and self._is_somebody_here():
            await self._take_last_words(RECEIVE_S, left_s)
        for _ in range(BURST):
            if not await self._take_last_words(0.0, 0.0):
                break
        with contextlib.suppress(OSError):  # a full disk is why the run ends
            self._journal.measure("counters", hub=dict(self._hub.counters), processes=self._tally.totals())

    def _is_somebody_here(self) -> bool:
        return any(self._supervisor.is_running(name) for name in self._hub.peers)

    def _dismiss(self, name: str, grace_s: float) -> None:
        self._supervisor.release(name)
        self._hub.send(name, m.Shutdown(reason="the run is over", deadline_s=grace_s))

    async def _take_last_words(self, timeout_s: float, grace_s: float) -> bool:
        received = await self._hub.receive(timeout_s)
        if received is None:
            return False
        peer, message = received
        try:
            if isinstance(message, m.Hello):
                self._dismiss(peer, grace_s)  # it came up only now
            else:
                self._take_in([received])
        except (UserError, OperationError, OSError) as error:
            log.warning("at the end: %s", error)  # why the run ends is known already
        return True

    # ------------------------------------------------------------ messages in

    async def _receive(self) -> None:
        while True:
            burst: list[tuple[str, m.Message]] = []
            try:
                received = await self._hub.receive(RECEIVE_S)
                while received is not None:
                    burst.append(received)
                    received = await self._hub.receive(0.0) if len(burst) < BURST else None
            finally:  # also when cancelled: what was taken from the hub is not thrown away
                self._take_in(burst)

    def _take_in(self, burst: Sequence[tuple[str, m.Message]]) -> None:
        received = [one for peer, message in burst if (one := self._event(peer, message)) is not None]
        mistakes = [error for _, message in burst if (error := self._mistake(message)) is not None]
        self._handle(received)
        for peer, message in burst:
            if isinstance(message, m.Goodbye) and self._roles.get(peer) == "trainer" and self._is_trainer_done():
                self._supervisor.release(peer)
        if mistakes and self._settings.stop_on_long_prompt:
            raise mistakes[0]

    def _mistake(self, message: m.Message) -> UserError | None:
        """A prompt that can never run, where the user wants to hear of it at once."""
        if not isinstance(message, m.SampleReturned) or message.reason != "rejected":
            return None
        where = "data.eval" if self._out.is_eval(message.lease_id) else "data.train"
        return UserError(f"rejected: {message.detail}", where=where, remedy="shorten it, or data.on_long_prompt=drop")

    def _event(self, peer: str, message: m.Message) -> InboundEvent | None:
        """What the message means to the coordinator, if anything; bookkeeping on the way."""
        match message:
            case m.Hello():
                self._roles[peer] = message.role
                self._supervisor.reported(peer)
                self._monitor.received(peer)
                if message.role == "rollout":
                    return InboundEvent(
                        WorkerJoined(worker=peer, incarnation=message.incarnation, capacity=message.capacity)
                    )
                return None
            case m.Goodbye():
                return self._crew.goodbye(peer, message.reason) if self._roles.get(peer) == "rollout" else None
            case _ if SPEAKERS.get(type(message)) != self._roles.get(peer):
                self._display.note(f"unexpected message {type(message).__name__} from {peer}", "warning")
                return None
            case m.Draining():
                return self._crew.draining(peer, self._clock())
            case m.SampleFinished():
                self._diverged.discard(peer)
            case m.VersionLoaded():
                self._tracer.instant("version_loaded", lane=peer, version=message.version)
                self._journal.measure(
                    "swap", worker=peer, version=message.version, stage_s=message.stage_s, pause_s=message.pause_s
                )
            case m.MemoryReleased():
                self._tracer.instant("memory_released", lane=peer, num_bytes=message.num_bytes)
                self._journal.measure("release", worker=peer, num_bytes=message.num_bytes, seconds=message.seconds)
            case m.VersionPublished():
                self._tracer.instant("version_published", version=message.version)
                if message.note:
                    self._display.note(f"{peer}: {message.note}")
            case m.CheckpointSaved():
                self._saved_version = max(self._saved_version, message.version)
                self._crew.checkpoint_saved(message.version, message.path)
                self._monitor.checkpoint_saved(message)
            case m.CheckpointFailed():
                self._crew.checkpoint_failed(message.reason)
                self._monitor.checkpoint_failed(message)
        return translate(peer, message, is_eval=self._out.is_eval)

    def _is_trainer_done(self) -> bool:
        last_step = self._last_step
        return last_step is not None and min(self._coordinator.trained, self._saved_version) >= last_step

    # ------------------------------------------------------------ effects out

    def _handle(self, burst: Sequence[InboundEvent]) -> None:
        """Events of one burst: one transaction for what must be remembered, then everything else, in order."""
        if self._is_unsettled:
            return
        self._is_unsettled = True
        entries: list[LedgerEntry] = []
        others: list[Effect] = []
        steps: list[tuple[int, InboundEvent]] = []
        for received in burst:
            before = self._coordinator.version
            for effect in self._coordinator.handle(received.event, self._clock()):
                if effect.is_ledger:
                    entries.append(entry_of(effect, received))
                else:
                    others.append(effect)
                if isinstance(effect, Note) and HANDLING[effect.kind].is_recorded:
                    entries.append(LedgerEntry(effect=RecordIncident(kind=effect.kind, text=effect.text)))
            if received.metrics and self._coordinator.version != before:  # a repeated announcement is no second step
                steps.append((self._coordinator.version, received))
        if entries:
            with self._tracer.span("ledger", entries=len(entries)):
                self._ledger.apply(entries)
        self._is_unsettled = False
        for entry in entries:
            self._tally.lengths.record(entry.effect)
            if isinstance(effect := entry.effect, DropGroup):
                self._journal.measure("dropped", group_id=effect.group_id, reason=effect.reason, detail=effect.detail)
        for version, received in steps:
            self._steps.published(version, received.metrics)
        for effect in others:
            self._carry_out(effect)
        if lost := self._out.take_lost():
            self._handle([InboundEvent(event) for event in lost])

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendLeases():
                if self._out.leases(effect):
                    self._steps.starts()
            case SendAck():
                self._out.send(effect.worker, m.SampleAck(lease_ids=effect.lease_ids))
            case SendCancel():
                self._out.send(effect.worker, m.CancelLeases(lease_ids=effect.lease_ids))
            case SendRecall():
                self._out.send(effect.worker, m.RecallLeases(lease_ids=effect.lease_ids))
            case SendVersion():
                self._out.version(effect)
            case SendSwap():
                self._out.send(effect.worker, m.SwapVersion(version=effect.version, lineage=effect.lineage))
            case SendRelease():
                self._out.send(effect.worker, m.ReleaseMemory(number=effect.number))
            case EndWorker():
                self._display.note(f"{effect.worker} is terminated: {effect.reason}", "warning")
                self._supervisor.end(effect.worker, effect.reason)
            case SendBatch():
                self._send_batch(effect)
            case SendRewrite():
                self._out.send("trainer", m.RewriteVersion(version=effect.version, lineage=effect.lineage))
            case SendNoMoreBatches():
                self._last_step = effect.last_step
                self._out.send("trainer", m.NoMoreBatches(last_step=effect.last_step, reason=effect.reason))
            case EvalDone():
                self._eval_done(effect)
            case EvalDropped():
                self._out.forget_ended_evals()
                self._display.note(f"evaluation of version {effect.version} given up: {effect.reason}", "warning")
            case PurgePayloads():
                report = self._ledger.purge(effect.covered_step)
                log.info("purged payloads up to step %d: %s", effect.covered_step, report)
            case Note():
                self._journal.measure("note", note=effect.kind, text=effect.text)
                log.info("%s: %s", effect.kind, effect.text)
                if HANDLING[effect.kind].is_traced:
                    self._tracer.instant(effect.kind, text=effect.text)
                if HANDLING[effect.kind].is_shown and self._outcome is None:  # leaving at the end is no news
                    self._display.note(effect.text, "warning")
            case EndRun():
                # With no worker left the last one's own words say more than that none is left.
                has_no_rollout_workers = effect.status == "failed" and not self._supervisor.watches_role("rollout")
                self._end(Outcome(effect.status, effect.reason, self._death if has_no_rollout_workers else None))
            case _:
                raise AssertionError(f"unhandled effect {type(effect).__name__}")

    def _send_batch(self, effect: SendBatch) -> None:
        batch = self._out.batch(effect, self._coordinator.counts())
        self._steps.shipped(
            effect.step,
            staleness=list(batch.position.staleness),
            num_samples=len(batch.samples),
            num_tokens=sum(sample.trajectory.num_sampled for sample in batch.samples),
            is_replay=effect.is_replay,
        )
        self._tracer.instant("batch_sent", step=effect.step, groups=len(effect.groups))

    def _eval_done(self, effect: EvalDone) -> None:
        self._out.forget_ended_evals()
        num_rows = len(effect.values)
        num_scored = self._tally.add_evaluation(effect.version, effect.values)
        if num_scored < num_rows:
            self._display.note(f"{num_rows - num_scored} of {num_rows} evaluated answers got no score", "warning")
        if not num_scored:
            return
        accuracy = self._tally.accuracy[effect.version]
        self._journal.measure(
            "eval", version=effect.version, accuracy=accuracy, num_scored=num_scored, num_rows=num_rows,
            eval=effect.kind,
        )  # fmt: skip
        self._display.accuracy(effect.version, accuracy, num_scored)

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        while True:
            now_s = self._clock()
            if self._stop_reason and not self._is_stop_sent:
                self._is_stop_sent = True
                self._watchdog.stop_requested(now_s)
                self._handle([InboundEvent(StopRequested(reason=self._stop_reason))])
            if self._outcome is not None:
                return
            for loss in await self._supervisor.tick(now_s):
                self._on_loss(loss)
            if ended := self._supervisor.take_ended():
                self._handle([InboundEvent(WorkerEnded(worker=name)) for name in ended])
            for words in self._supervisor.take_news():
                self._display.note(words, "warning")
            self._handle([*self._crew.tick(now_s), InboundEvent(Tick())])
            self._monitor.tick()
            self._watch(now_s)
            await asyncio.sleep(TICK_S)

    def _on_loss(self, loss: Loss) -> None:
        note = f"{loss.name}: {loss.reason}"
        if loss.role == "trainer" and self._is_trainer_done():
            log.warning("%s, after its work was done", note)
            return
        self._monitor.lost(loss)
        if loss.is_permanent:
            self._death = self._supervisor.died(loss)
        if loss.is_divergence and self._has_diverged(loss):
            self._end(Outcome("failed", loss.reason, self._supervisor.died(loss)))
        elif loss.role == "rollout":
            self._display.note(note + ("; not restarted" if loss.is_permanent else "; restarting it"), "warning")
            lost = WorkerLost(
                worker=loss.name, reason=loss.reason, is_permanent=loss.is_permanent, may_live=loss.may_live
            )
            self._handle([InboundEvent(lost)])
        elif loss.role == "trainer" and not loss.is_permanent:
            self._restart = self._group.create_task(self._restart_trainer(loss))
        elif not loss.is_permanent:
            self._display.note(note + "; restarting it", "warning")
        elif loss.role == "reward" and self._supervisor.watches_role("reward"):
            self._display.note(note + "; not restarted, the other reward services continue", "warning")
        else:
            self._end(Outcome("failed", note, self._death))
            if loss.role == "trainer":
                self._handle([InboundEvent(TrainerLost(reason=note))])

    async def _restart_trainer(self, loss: Loss) -> None:
        """It goes on from its last checkpoint; what is shown of it is the coordinator's note."""
        self._crew.checkpoint_failed(f"the trainer died ({loss.reason})")
        event, warnings = await self._trainer_restart.begin(loss)
        for words in warnings:
            self._display.note(words, "warning")
        self._saved_version = event.checkpoint_version
        self._handle([InboundEvent(event)])

    def _has_diverged(self, loss: Loss) -> bool:
        """The trainer says so, or every rollout worker does: one alone may be at fault itself (`atomic-versions`)."""
        if loss.role == "rollout":
            self._diverged.add(loss.name)
        return loss.role == "trainer" or self._diverged.issuperset(self._supervisor.names_of("rollout"))

    def _watch(self, now_s: float) -> None:
        counted = self._tally.total("rollout", "tokens") + self._tally.total("trainer", "micro_batches")
        is_restarting = self._restart is not None and not self._restart.done()
        has_own_deadline = is_restarting or self._supervisor.is_pool_unplaced()
        progress = (self._coordinator.progress, counted, self._supervisor.restarts, now_s if has_own_deadline else 0.0)
        if warning := self._watchdog.look(now_s, progress, self._coordinator.waits()):
            self._display.note(warning, "warning")
