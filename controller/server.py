"""The thin asyncio and ZeroMQ shell around the pure coordinator.

Owns: turning messages into events and effects into ledger entries and messages, the clock, the watchdog. Refuses:
decisions about samples (coordinator.py), process life (supervision.py), what is shown (display.py).

Map of the loops (all in one TaskGroup, all end with `_over`):
  _receive   waits for the hub (at most RECEIVE_S); its waker is any process of the run. Handles messages in bursts: one
             ledger transaction for the burst, then the sends (an acknowledgement never precedes its commit, law 4).
  _tick      every TICK_S: processes (supervisor), deadlines (coordinator Tick), stall watchdog, display.
Whoever sees the end sets `_over`: the coordinator's EndRun, a fatal error, a second signal.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_like import messages as m
from areal_like.channel import Hub
from areal_like.errors import DeadlineExceeded, OperationError, UserError
from areal_like.metrics import JsonlLog
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from controller import protocol as p
from controller.coordinator import Coordinator
from controller.display import Display, Snapshot
from controller.ledger import Ledger, LedgerEntry
from controller.progress import StepReporter
from controller.summary import Tally
from controller.supervision import Supervisor

log = logging.getLogger(__name__)

RECEIVE_S = 0.2
TICK_S = 0.2
BURST = 256
"""Messages handled before their ledger transaction is committed: bounds the delay of an acknowledgement."""

ACCEPTED = frozenset(
    {
        m.Progress, m.SampleFinished, m.SampleReturned, m.VersionLoaded, m.VersionFailed,
        m.BatchRequest, m.VersionPublished, m.CheckpointSaved,
    }
)  # fmt: skip
"""What processes of a run may tell the controller, beside Hello, Heartbeat and Goodbye."""


class Rows(Protocol):
    """Where the server finds the data row of a draw (training) or of an evaluation."""

    def train(self, group_id: int) -> Mapping[str, Any]: ...

    def eval(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: p.EndStatus
    reason: str
    error: Exception | None = None


@dataclass(frozen=True)
class ServerSettings:
    """The few facts that the shell itself needs; times in seconds."""

    seed: int
    num_steps: int
    train_sampling: m.Sampling
    eval_sampling: m.Sampling
    segment_tokens: int
    stop_on_long_prompt: bool
    stall_after_s: float
    stop_grace_s: float


def stream_seed(seed: int, purpose: m.Purpose, group_id: int, sample_index: int) -> int:
    """Key of one sample's random stream: 62 bits, a pure function of the run's seed and the sample's name."""
    name = f"{seed}/{purpose}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2


@dataclass
class Payload:
    """What a message carries beside its event."""

    segments: Mapping[int, Segment]
    finished: m.SampleFinished | None = None
    worker: str = ""


_NOTHING = Payload({})


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
        rows: Rows,
        display: Display,
        tally: Tally,
        metrics: JsonlLog,
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._coordinator, self._ledger = settings, coordinator, ledger
        self._hub, self._supervisor, self._rows = hub, supervisor, rows
        self._display, self._tally, self._metrics, self._tracer = display, tally, metrics, tracer
        self._clock = clock
        self._started_s = clock()
        self._steps = StepReporter(tally, display, metrics, num_steps=settings.num_steps, clock=clock)
        self._over = asyncio.Event()
        self._outcome: Outcome | None = None
        self._num_stop_requests = 0
        self._stop_due_s: float | None = None
        self._eval_leases: set[int] = set()
        self._unreachable: list[p.Event] = []
        self._last_progress: tuple[object, float] = (None, clock())
        self._is_stalling = False

    # ------------------------------------------------------------ life

    async def run(self, first_events: Sequence[p.Event]) -> Outcome:
        """Serve until the run is over. `first_events` bring the coordinator to life (RunStarted, ...)."""
        self._handle_all([(event, _NOTHING) for event in first_events])
        try:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(self._receive()), group.create_task(self._tick())]
                await self._over.wait()
                for loop in loops:
                    loop.cancel()
        except* (UserError, OperationError) as errors:
            error = errors.exceptions[0]
            assert isinstance(error, Exception)
            self._outcome = Outcome("failed", str(error), error)
        assert self._outcome is not None
        return self._outcome

    def request_stop(self, reason: str) -> None:
        """First call: finish the running step, save, end. Second call: end now."""
        self._num_stop_requests += 1
        if self._num_stop_requests == 1:
            self._display.note(f"{reason}: finishing the running step and saving (once more: stop now)", "warning")
            self._stop_due_s = self._clock() + self._settings.stop_grace_s
            self._handle_all([(p.StopRequested(reason=reason), _NOTHING)])
        else:
            self._end(Outcome("stopped", f"{reason} twice: stopped at once", StoppedAtOnce()))

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._over.set()

    async def farewell(self, grace_s: float) -> None:
        """Tell every process to end; what they have finished meanwhile is still recorded."""
        for name in list(self._hub.peers):
            self._supervisor.release(name)
            self._hub.send(name, m.Shutdown(reason="the run is over", deadline_s=grace_s))
        deadline_s = self._clock() + grace_s
        while self._hub.peers and self._clock() < deadline_s:
            received = await self._hub.receive(RECEIVE_S)
            if received is not None and (pair := self._translate(*received)) is not None:
                self._handle_all([pair])  # what was finished meanwhile is kept, and a resumed run goes on from it

    # ------------------------------------------------------------ messages in

    async def _receive(self) -> None:
        while True:
            received = await self._hub.receive(RECEIVE_S)
            pairs: list[tuple[p.Event, Payload]] = []
            while received is not None and len(pairs) < BURST:
                pair = self._translate(*received)
                if pair is not None:
                    pairs.append(pair)
                received = await self._hub.receive(0.0)
            if received is not None and (pair := self._translate(*received)) is not None:
                pairs.append(pair)
            self._handle_all(pairs)

    def _translate(self, peer: str, message: m.Message) -> tuple[p.Event, Payload] | None:
        match message:
            case m.Hello(role="rollout"):
                self._supervisor.reported(peer)
                return p.WorkerJoined(worker=peer, incarnation=message.incarnation, capacity=message.capacity), _NOTHING
            case m.Hello():
                self._supervisor.reported(peer)
                return None
            case m.Goodbye():
                return self._on_goodbye(peer, message.reason)
            case m.Progress():
                return self._on_progress(peer, message)
            case m.SampleFinished():
                return self._on_finished(peer, message)
            case m.SampleReturned():
                if self._settings.stop_on_long_prompt and message.reason.startswith("rejected"):
                    raise UserError(
                        message.reason, where="data.train", remedy="shorten it, or data.on_long_prompt=drop"
                    )
                part = _report(message.lease_id, message.start, message.segment)
                payload = Payload({message.lease_id: message.segment}, worker=peer)
                return p.LeaseReturned(worker=peer, part=part, reason=message.reason), payload
            case m.VersionLoaded():
                self._tracer.instant("version_loaded", lane=peer, version=message.version)
                self._metrics.append(
                    {"kind": "swap", "worker": peer, "version": message.version, "stage_s": message.stage_s,
                     "pause_s": message.pause_s}
                )  # fmt: skip
                return p.WorkerVersionLoaded(worker=peer, version=message.version, lineage=message.lineage), _NOTHING
            case m.VersionFailed():
                return p.WorkerVersionFailed(
                    worker=peer, version=message.version, lineage=message.lineage, reason=message.reason
                ), _NOTHING
            case m.BatchRequest():
                return p.BatchRequested(step=message.step), _NOTHING
            case m.VersionPublished():
                if message.metrics:
                    self._steps.published(message.version, message.metrics)
                self._tracer.instant("version_published", version=message.version)
                return p.Published(
                    version=message.version, lineage=message.lineage, manifest_path=message.manifest_path
                ), _NOTHING
            case m.CheckpointSaved():
                return p.CheckpointTaken(version=message.version, path=message.path), _NOTHING
        self._display.note(f"{peer} sent {type(message).__name__}, which nobody awaits", "warning")
        return None

    def _on_goodbye(self, peer: str, reason: str) -> tuple[p.Event, Payload] | None:
        self._supervisor.release(peer)
        if peer.startswith("rollout"):
            return p.WorkerLost(worker=peer, reason=reason or "said goodbye", is_permanent=True), _NOTHING
        return None

    def _on_progress(self, peer: str, message: m.Progress) -> tuple[p.Event, Payload]:
        items = tuple(_report(item.lease_id, item.start, item.segment) for item in message.items)
        segments = {item.lease_id: item.segment for item in message.items}
        return p.ProgressReported(worker=peer, items=items), Payload(segments, worker=peer)

    def _on_finished(self, peer: str, message: m.SampleFinished) -> tuple[p.Event, Payload]:
        verdict, trajectory = message.verdict, message.trajectory
        value = verdict.value
        if message.lease_id in self._eval_leases:
            self._eval_leases.discard(message.lease_id)
            value = verdict.components.get("correct", value) if verdict.is_scored else None
        event = p.SampleReported(
            worker=peer,
            lease_id=message.lease_id,
            group_id=message.group_id,
            sample_index=message.sample_index,
            num_tokens=trajectory.num_sampled,
            first_version=trajectory.first_version,
            last_version=trajectory.last_version,
            verdict_kind=verdict.kind,
            value=value,
        )
        return event, Payload({}, finished=message, worker=peer)

    # ------------------------------------------------------------ effects out

    def _handle_all(self, pairs: Sequence[tuple[p.Event, Payload]]) -> None:
        """Events of one burst: one transaction for what must be remembered, then everything else, in order."""
        entries: list[LedgerEntry] = []
        others: list[p.Effect] = []
        for event, payload in pairs:
            for effect in self._coordinator.handle(event, self._clock()):
                if effect.is_ledger:
                    entries.append(self._entry(effect, payload))
                else:
                    others.append(effect)
        if entries:
            with self._tracer.span("ledger", entries=len(entries)):
                self._ledger.apply(entries)
        for entry in entries:
            self._observe(entry.effect)
        for effect in others:
            self._carry_out(effect)
        if self._unreachable:
            lost, self._unreachable = self._unreachable, []
            self._handle_all([(event, _NOTHING) for event in lost])

    @staticmethod
    def _entry(effect: p.Effect, payload: Payload) -> LedgerEntry:
        match effect:
            case p.StorePartial():
                return LedgerEntry(effect=effect, segment=payload.segments[effect.lease_id])
            case p.StoreFinished():
                finished = payload.finished
                assert finished is not None, "StoreFinished without a finished sample at hand"
                return LedgerEntry(
                    effect=effect,
                    trajectory=finished.trajectory,
                    verdict=finished.verdict,
                    response_text=finished.response_text,
                    timings=finished.timings,
                    worker=payload.worker,
                )
        return LedgerEntry(effect=effect)

    def _observe(self, effect: p.Effect) -> None:
        """Numbers about what was just recorded."""
        if isinstance(effect, p.DropGroup):
            self._metrics.append(
                {"kind": "dropped", "group_id": effect.group_id, "reason": effect.reason, "detail": effect.detail}
            )

    def _carry_out(self, effect: p.Effect) -> None:
        match effect:
            case p.SendLeases():
                self._steps.starts()
                # A later event of the same burst may have ended a lease that an earlier one made.
                live = [order for order in effect.leases if self._coordinator.is_live(order.lease_id)]
                self._send(effect.worker, m.Lease(tasks=tuple(self._task(order) for order in live)))
            case p.SendAck():
                self._send(effect.worker, m.SampleAck(lease_ids=effect.lease_ids))
            case p.SendCancel():
                self._send(effect.worker, m.CancelLeases(lease_ids=effect.lease_ids))
            case p.SendVersion():
                announcement = m.AnnounceVersion(
                    version=effect.version, lineage=effect.lineage, manifest_path=effect.manifest_path
                )
                self._send(effect.worker, announcement)
            case p.SendBatch():
                self._send_batch(effect)
            case p.SendNoMoreBatches():
                self._send("trainer", m.NoMoreBatches(last_step=effect.last_step, reason=effect.reason))
            case p.EvalDone():
                self._eval_done(effect)
            case p.EvalDropped():
                self._display.note(f"evaluation of version {effect.version} given up: {effect.reason}", "warning")
            case p.PurgePayloads():
                report = self._ledger.purge(effect.covered_step)
                log.info("purged payloads up to step %d: %s", effect.covered_step, report)
            case p.Note():
                self._metrics.append({"kind": "note", "note": effect.kind, "text": effect.text})
                log.info("%s: %s", effect.kind, effect.text)
                if effect.kind in LOUD_NOTES:
                    self._display.note(effect.text, "warning")
            case p.EndRun():
                self._end(Outcome(effect.status, effect.reason))
            case _:
                raise AssertionError(f"no hands for {type(effect).__name__}")

    def _send(self, peer: str, message: m.Message) -> None:
        """Send; a rollout worker out of reach is lost until it says Hello again, and its leases go on elsewhere."""
        if self._hub.send(peer, message):
            return
        log.warning("%s cannot be reached with %s", peer, type(message).__name__)
        info = self._hub.peers.get(peer)
        if info is not None and info.role == "rollout":
            self._hub.forget(peer)
            self._unreachable.append(p.WorkerLost(worker=peer, reason="unreachable", incarnation=info.incarnation))

    def _task(self, order: p.LeaseOrder) -> m.SampleTask:
        is_eval = order.purpose == "eval"
        if is_eval:
            self._eval_leases.add(order.lease_id)
        row = self._rows.eval(order.group_id) if is_eval else self._rows.train(order.group_id)
        prefix = Segment.empty()
        if order.prefix_tokens:
            prefix = self._ledger.prefix(order.group_id, order.sample_index)
            assert len(prefix) == order.prefix_tokens, "ledger and coordinator disagree on a prefix"
        return m.SampleTask(
            lease_id=order.lease_id,
            group_id=order.group_id,
            sample_index=order.sample_index,
            purpose=order.purpose,
            min_version=order.min_version,
            row=dict(row),
            sampling=self._settings.eval_sampling if is_eval else self._settings.train_sampling,
            seed=stream_seed(self._settings.seed, order.purpose, order.group_id, order.sample_index),
            prefix=prefix,
            segment_tokens=0 if is_eval else self._settings.segment_tokens,
        )

    def _send_batch(self, effect: p.SendBatch) -> None:
        samples = self._ledger.batch_samples(effect.groups)
        self._steps.shipped(
            effect.step,
            staleness=[effect.step - 1 - group.first_version for group in effect.groups],
            num_samples=len(samples),
            num_tokens=sum(sample.trajectory.num_sampled for sample in samples),
            is_replay=effect.is_replay,
        )
        self._tracer.instant("batch_sent", step=effect.step, groups=len(effect.groups))
        batch = m.Batch(step=effect.step, lineage=effect.lineage, samples=samples, is_replay=effect.is_replay)
        self._send("trainer", batch)

    def _eval_done(self, effect: p.EvalDone) -> None:
        scored = [value for value in effect.values if value is not None]
        if len(scored) < len(effect.values):
            missing = len(effect.values) - len(scored)
            self._display.note(f"{missing} of {len(effect.values)} evaluated answers got no score", "warning")
        if not scored:
            return
        accuracy = sum(scored) / len(scored)
        self._tally.accuracy[effect.version] = accuracy
        self._tally.eval_rows[effect.version] = len(scored)
        self._metrics.append(
            {"kind": "eval", "version": effect.version, "accuracy": accuracy, "num_scored": len(scored),
             "num_rows": len(effect.values), "eval": effect.kind}
        )  # fmt: skip
        self._display.accuracy(effect.version, accuracy, len(scored))

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        while True:
            now_s = self._clock()
            for loss in await self._supervisor.tick(now_s):
                self._on_loss(loss)
            self._handle_all([(p.Tick(), _NOTHING)])
            for name, info in self._hub.peers.items():
                if info.heartbeat is not None:
                    self._tally.add_counters(name, info.heartbeat.counters)
            self._watch(now_s)
            self._show(now_s)
            await asyncio.sleep(TICK_S)

    def _on_loss(self, loss: Any) -> None:
        note = f"{loss.name}: {loss.reason}"
        if loss.role == "rollout":
            self._display.note(note + ("; it stays away" if loss.is_permanent else "; starting it again"), "warning")
            event: p.Event = p.WorkerLost(worker=loss.name, reason=loss.reason, is_permanent=loss.is_permanent)
            self._handle_all([(event, _NOTHING)])
            if loss.is_permanent and self._outcome is not None and self._outcome.status == "failed":
                self._outcome = Outcome("failed", self._outcome.reason, self._supervisor.died(loss))
        elif loss.role == "reward" and not loss.is_permanent:
            self._display.note(note + "; starting it again", "warning")
        else:
            self._handle_all([(p.TrainerLost(reason=note), _NOTHING)] if loss.role == "trainer" else [])
            self._outcome = None
            self._end(Outcome("failed", note, self._supervisor.died(loss)))

    def _watch(self, now_s: float) -> None:
        """Law 7: no progress for too long while work is left is an end with words, not a hang."""
        tokens = self._tally.total("rollout", "tokens") + self._tally.total("trainer", "micro_batches")
        progress = (self._coordinator.progress, tokens, self._supervisor.restarts)
        if progress != self._last_progress[0]:
            self._last_progress, self._is_stalling = (progress, now_s), False
            return
        idle_s = now_s - self._last_progress[1]
        waits = "; ".join(self._coordinator.waits()) or "nobody says what for"
        if idle_s > self._settings.stall_after_s:
            raise DeadlineExceeded(f"any progress ({waits})", "the processes named", self._settings.stall_after_s)
        if idle_s > self._settings.stall_after_s / 2 and not self._is_stalling:
            self._is_stalling = True
            self._display.note(f"no progress for {idle_s:.0f} s: {waits}", "warning")
        if self._stop_due_s is not None and now_s > self._stop_due_s:
            raise DeadlineExceeded(
                f"the running step and its checkpoint ({waits})", "the trainer", self._settings.stop_grace_s
            )

    def _show(self, now_s: float) -> None:
        counts = self._coordinator.counts()
        self._display.show(
            Snapshot(
                version=self._coordinator.version,
                waits=self._coordinator.waits(),
                states=self._supervisor.states(),
                counts={
                    "drawn": counts.drawn, "consumed": counts.consumed, "filtered": counts.filtered,
                    "dropped": sum(counts.dropped.values()), "running": counts.running, "ready": counts.ready,
                },
                elapsed_s=now_s - self._started_s,
            )
        )  # fmt: skip


class StoppedAtOnce(OperationError):
    """The user asked twice."""

    def __init__(self) -> None:
        super().__init__("stopped at once; continue with areal-like resume")


LOUD_NOTES = frozenset({"quarantined", "dropped", "rejected", "worker_lost", "advice", "eval_repinned"})
"""Notes of the coordinator that are shown, not only logged."""


def _report(lease_id: int, start: int, segment: Segment) -> p.PartialReport:
    return p.PartialReport(
        lease_id=lease_id,
        start=start,
        num_tokens=len(segment),
        first_version=segment.first_version,
        last_version=segment.last_version,
    )
