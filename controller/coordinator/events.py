"""Events that the coordinator handles, and types shared with its settings and effects.

Frozen types only: no behaviour and no token payloads (events contain counts and versions).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from areal_like.trajectory import NO_VERSION
from areal_like.wire.messages import ReturnReason
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import (
    BatchRecord,
)

EvalKind = Literal["baseline", "periodic", "final"]

OnFailure = Literal["drop_sample", "drop_group"] | float

Policy = Literal["", "drop_sample", "drop_group", "value"]
"""Handling of a missing score; empty if there is a score."""

RoutingPolicy = Literal["least_tokens", "round_robin"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""


class RunStarted(Event, frozen=True):
    """First event of every session. `lineage` is new at each start ("l0", "l1", ...).

    checkpoint_version: the version the trainer starts from; recorded batches after it are replayed (`exactly-once`).
    """

    lineage: str
    checkpoint_version: int = 0


class WorkerJoined(Event, frozen=True):
    """A rollout worker registered with Hello (for the first time, again after silence, or as a new process of the same
    name).
    """

    worker: str
    incarnation: str
    capacity: int
    is_external: bool = False
    """The run did not start it and does not restart it; it may leave at any time."""


class WorkerLost(Event, frozen=True):
    """A rollout worker is silent, has exited or sent Goodbye; its leases return to the queue with the tokens it had
    reported.

    is_permanent: it will not be restarted. A lost worker counts again only after a new `WorkerJoined` (same incarnation
    allowed); its finished samples are accepted at any time.
    """

    worker: str
    reason: str
    is_permanent: bool = False
    incarnation: str | None = None
    """Which process was lost, if known: the loss of a process older than the last that joined is ignored."""
    may_live: bool = False
    """Its process may still have memory: it cannot be reached, was killed or sent Goodbye. `WorkerEnded` follows."""
    may_return: bool = False
    """Permanent loss of an external worker that was silent: nobody saw its process end, so it may register again."""


class WorkerEnded(Event, frozen=True):
    """The process of a rollout worker has exited, so its resources are free; a new process of the same name starts
    after it.
    """

    worker: str


class WorkerVersionStaged(Event, frozen=True):
    """The worker has `version` complete and verified on its host, and waits for permission to swap it in."""

    worker: str
    version: int
    lineage: str


class WorkerVersionLoaded(Event, frozen=True):
    """The worker samples with `version` from now on."""

    worker: str
    version: int
    lineage: str


class WorkerVersionFailed(Event, frozen=True):
    """The worker could not load `version` and continues with its old one."""

    worker: str
    version: int
    lineage: str
    reason: str
    is_damaged: bool = False
    """Bytes of the published version are damaged or missing; it can be loaded when it has been rewritten."""


class WorkerDraining(Event, frozen=True):
    """The worker exits gracefully (spot notice, `areal-like drain`): it returns its leases."""

    worker: str
    incarnation: str | None = None
    """Which process is draining, if known: its successor is not affected."""


class WorkerIncident(Event, frozen=True):
    """An error inside the worker from which it recovered."""

    worker: str
    text: str


class WorkerSpeed(Event, frozen=True):
    """Measured sampling speed of a busy worker, from its heartbeats."""

    worker: str
    tokens_per_s: float
    """Tokens per second of all its answers together."""
    steps_per_s: float = 0.0
    """Tokens per second of one answer in a small batch; 0: not known."""


class PartialReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lease since its last report: answer positions start .. start + num_tokens - 1."""

    lease_id: int
    start: int
    num_tokens: int
    first_version: int = NO_VERSION
    """Version of the first of these tokens; -1 if there are none."""
    last_version: int = NO_VERSION


class ProgressReported(Event, frozen=True):
    """Partial work (messages.Progress)."""

    worker: str
    items: tuple[PartialReport, ...]


class SampleReported(Event, frozen=True):
    """A finished and scored sample (messages.SampleFinished), possibly late or a duplicate."""

    worker: str
    outcome: SampleOutcome


class LeaseReturned(Event, frozen=True):
    """A lease returned unfinished (messages.SampleReturned); `part` contains the tokens not yet reported."""

    worker: str
    part: PartialReport
    reason: ReturnReason
    detail: str = ""
    """Why it can never run, if reason is "rejected" or "refused"; what failed, if it is "cancelled"."""


class WorkerReleased(Event, frozen=True):
    """The worker has released its engine's memory in answer to request `number`; it has no version any more."""

    worker: str
    number: int
    num_bytes: int


class BatchRequested(Event, frozen=True):
    """The trainer requests the batch of `step`; it may request one step ahead, and again a step that it already
    received.
    """

    step: int


class Published(Event, frozen=True):
    """The trainer published `version`; after the starting version this also means that step `version` is done."""

    version: int
    lineage: str
    manifest_path: str


class VersionRewritten(Event, frozen=True):
    """The trainer has rewritten `version` completely (SendRewrite), or has not: then `reason` says why."""

    version: int
    lineage: str
    manifest_path: str
    reason: str = ""


class CheckpointTaken(Event, frozen=True):
    """A checkpoint of `version` is complete. digest: SHA-256 of its manifest; empty: unknown."""

    version: int
    path: str
    digest: str = ""


class TrainerLost(Event, frozen=True):
    """The trainer is lost permanently; the run ends as failed and can be resumed."""

    reason: str


class TrainerRestarted(Event, frozen=True):
    """The trainer was lost and is restarted from the checkpoint of `checkpoint_version`, under a new lineage
    (`exactly-once`).

    batches: the recorded batches of the steps after that version, which are replayed in order. No message of the lost
    trainer is received after this event.
    """

    reason: str
    lineage: str
    checkpoint_version: int
    batches: tuple[BatchRecord, ...]


class StopRequested(Event, frozen=True):
    """Finish the current step, save, end (Ctrl-C once)."""

    reason: str = "stop requested"


class EarlyStopReached(Event, frozen=True):
    """A metric of the evaluations gets no better: use what is recorded, evaluate, save, end as completed."""

    reason: str


class Tick(Event, frozen=True):
    """Time has passed; sent about once a second for deadlines and retries."""
