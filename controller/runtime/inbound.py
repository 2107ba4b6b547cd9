"""Maps messages of processes to events of the coordinator, and ledger effects to ledger entries.

Pure mapping; whether a message is valid in the present state is decided in coordinator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_like.trajectory import Segment
from areal_like.turn_checkpoint import TurnCheckpoint
from areal_like.wire import messages as m
from controller.coordinator.effects import Effect, StoreFinished, StorePartial
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    Event,
    LeaseReturned,
    PartialReport,
    ProgressReported,
    Published,
    SampleReported,
    VersionRewritten,
    WorkerIncident,
    WorkerReleased,
    WorkerVersionFailed,
    WorkerVersionLoaded,
    WorkerVersionStaged,
)
from controller.coordinator.sample_outcome import MAX_REASON_CHARS, SampleOutcome
from controller.ledger.ledger import LedgerEntry

SPEAKERS: Mapping[type[m.Message], m.Role] = {
    m.Progress: "rollout",
    m.SampleFinished: "rollout",
    m.SampleReturned: "rollout",
    m.VersionStaged: "rollout",
    m.VersionLoaded: "rollout",
    m.VersionFailed: "rollout",
    m.Draining: "rollout",
    m.MemoryReleased: "rollout",
    m.Incident: "rollout",
    m.BatchRequest: "trainer",
    m.VersionPublished: "trainer",
    m.VersionRewritten: "trainer",
    m.CheckpointSaved: "trainer",
    m.CheckpointFailed: "trainer",
    m.JoinRequest: "candidate",
    m.JoinedWorkerEnded: "candidate",
}
"""Messages that each role may send, in addition to Hello, Heartbeat and Goodbye."""
ACCEPTED: frozenset[type] = frozenset(SPEAKERS)


@dataclass(frozen=True)
class InboundEvent:
    """An event and the payloads of its message."""

    event: Event
    segments: Mapping[int, Segment] = field(default_factory=dict)
    """Partial tokens by lease."""
    checkpoints: Mapping[int, TurnCheckpoint] = field(default_factory=dict)
    """Checkpoints by lease, for episodes of several turns."""
    finished: m.SampleFinished | None = None
    worker: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the trainer for the step that ends with this event."""


def translate(peer: str, message: m.Message, *, is_eval: Callable[[int], bool]) -> InboundEvent | None:
    """The event of a `message` of `peer`; None if it has none (Hello, Goodbye, unexpected messages).

    is_eval(lease_id): whether the lease is for an evaluation.
    """
    match message:
        case m.Progress():
            items = tuple(_report(item.lease_id, item.start, item.segment) for item in message.items)
            return _with_parts(ProgressReported(worker=peer, items=items), message.items, peer)
        case m.SampleFinished():
            outcome = SampleOutcome.from_message(message, is_eval=is_eval(message.lease_id))
            return InboundEvent(SampleReported(worker=peer, outcome=outcome), finished=message, worker=peer)
        case m.SampleReturned():
            part = _report(message.lease_id, message.start, message.segment)
            returned = LeaseReturned(worker=peer, part=part, reason=message.reason, detail=message.detail)
            return _with_parts(returned, (message,), peer)
        case m.VersionStaged():
            return InboundEvent(WorkerVersionStaged(worker=peer, version=message.version, lineage=message.lineage))
        case m.VersionLoaded():
            return InboundEvent(WorkerVersionLoaded(worker=peer, version=message.version, lineage=message.lineage))
        case m.VersionFailed():
            failed = WorkerVersionFailed(
                worker=peer, version=message.version, lineage=message.lineage,
                reason=message.reason[:MAX_REASON_CHARS], is_damaged=message.is_damaged,
            )  # fmt: skip
            return InboundEvent(failed)
        case m.MemoryReleased():
            return InboundEvent(WorkerReleased(worker=peer, number=message.number, num_bytes=message.num_bytes))
        case m.Incident():
            return InboundEvent(WorkerIncident(worker=peer, text=message.text[:MAX_REASON_CHARS]))
        case m.BatchRequest():
            return InboundEvent(BatchRequested(step=message.step))
        case m.VersionPublished():
            published = Published(version=message.version, lineage=message.lineage, manifest_path=message.manifest_path)
            return InboundEvent(published, metrics=message.metrics)
        case m.VersionRewritten():
            rewritten = VersionRewritten(
                version=message.version, lineage=message.lineage, manifest_path=message.manifest_path,
                reason=message.reason[:MAX_REASON_CHARS],
            )  # fmt: skip
            return InboundEvent(rewritten)
        case m.CheckpointSaved():
            taken = CheckpointTaken(version=message.version, path=message.path, digest=message.digest)
            return InboundEvent(taken)
    return None


def _with_parts(event: Event, parts: Sequence[m.SampleProgress | m.SampleReturned], peer: str) -> InboundEvent:
    """The event with its partial tokens."""
    checkpoints = {part.lease_id: part.checkpoint for part in parts if part.checkpoint is not None}
    segments = {part.lease_id: part.segment for part in parts}
    return InboundEvent(event, segments=segments, checkpoints=checkpoints, worker=peer)


def _report(lease_id: int, start: int, segment: Segment) -> PartialReport:
    return PartialReport(
        lease_id=lease_id,
        start=start,
        num_tokens=len(segment),
        first_version=segment.first_version,
        last_version=segment.last_version,
    )


def entry_of(effect: Effect, inbound: InboundEvent) -> LedgerEntry:
    """Make the ledger entry for an effect of `inbound`'s event."""
    match effect:
        case StorePartial():
            lease_id = effect.lease_id
            checkpoint = inbound.checkpoints.get(lease_id)
            return LedgerEntry(effect=effect, segment=inbound.segments[lease_id], checkpoint=checkpoint)
        case StoreFinished():
            finished = inbound.finished
            assert finished is not None, "StoreFinished without its finished sample"
            return LedgerEntry(
                effect=effect,
                trajectories=finished.trajectories,
                verdict=finished.verdict,
                response_text=finished.response_text,
                timings=finished.timings,
                worker=inbound.worker,
            )
    return LedgerEntry(effect=effect)
