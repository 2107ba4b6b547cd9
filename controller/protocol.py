"""The vocabulary of the coordinator: events in, effects out, and what the ledger gives back after a crash.

Owns: frozen types only. Refuses: behaviour, token payloads (they never enter the logic: events carry counts and
versions, effects name whose payload is meant, and the shell has the message at hand).

Contract with the shell (`controller/server.py`):
  1. `effects = coordinator.handle(event, now_s)`; in the list all effects with `is_ledger` come first.
  2. The ledger effects of one or several handled events, with their payloads, are applied and committed as one.
  3. Only then the other effects are carried out, in order. A crash between 1 and 2, or 2 and 3, loses nothing told.
     Of `SendLeases` only those that are `Coordinator.is_live` by then: a later event of the burst may have ended some.
  4. A message that cannot be sent to a worker means `WorkerLost`, and `WorkerJoined` when it is heard again.
`StorePartial` and `StoreFinished` always refer to the payload of the very event that was handled (found by `lease_id`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from areal_like.messages import Purpose
from areal_like.trajectory import NO_VERSION
from areal_like.verdict import VerdictKind
from controller.records import (
    BatchGroup,
    BatchRecord,
    CheckpointRecord,
    Counts,
    GroupRecord,
    LedgerState,
    SampleRecord,
)

__all__ = ["BatchGroup", "BatchRecord", "CheckpointRecord", "Counts", "GroupRecord", "LedgerState", "SampleRecord"]

EvalKind = Literal["baseline", "periodic", "final"]
EndStatus = Literal["completed", "exhausted", "stopped", "failed"]
"""`completed`: num_steps done. `exhausted`: the data ran out first, in good order. `stopped`: asked to. `failed`."""
OnStale = Literal["wait", "drop", "keep"]
OnFailure = Literal["drop_sample", "drop_group"] | float
Policy = Literal["", "drop_sample", "drop_group", "value"]
"""What was done about a non-score; empty where there is a score."""
Mode = Literal["async", "one_step_off", "sync"]
RoutingPolicy = Literal["least_tokens", "round_robin"]


# ---------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""


class RunStarted(Event, frozen=True):
    """First event of every process life. `lineage` is new at each start ("l0", "l1", ...).

    checkpoint_version: the version the trainer starts from; recorded batches after it are replayed (law 4).
    """

    lineage: str
    checkpoint_version: int = 0


class WorkerJoined(Event, frozen=True):
    """A rollout worker said Hello (for the first time, again after silence, or as a new process of the same name)."""

    worker: str
    incarnation: str
    capacity: int


class WorkerLost(Event, frozen=True):
    """A rollout worker is silent, dead or said Goodbye; its leases go back with the tokens it had reported.

    is_permanent: no restart will come. A lost worker is heard again only after a new `WorkerJoined` (same incarnation
    allowed); its finished samples are welcome at any time.
    """

    worker: str
    reason: str
    is_permanent: bool = False
    incarnation: str | None = None
    """Which process was lost, if known: the loss of an older one than the last that joined is ignored."""
    may_live: bool = False
    """Only the way to it is lost: its process may still hold memory."""


class WorkerVersionStaged(Event, frozen=True):
    """The worker has `version` complete and verified on its host, and waits for its turn to swap it in."""

    worker: str
    version: int
    lineage: str


class WorkerVersionLoaded(Event, frozen=True):
    """The worker samples with `version` from now on."""

    worker: str
    version: int
    lineage: str


class WorkerVersionFailed(Event, frozen=True):
    """The worker could not load `version` and goes on with its old one."""

    worker: str
    version: int
    lineage: str
    reason: str


class WorkerDraining(Event, frozen=True):
    """The worker leaves in good order (spot notice, `areal-like drain`): it hands back what it holds."""

    worker: str
    incarnation: str | None = None
    """Which process said so, if known: its successor stays."""


class WorkerIncident(Event, frozen=True):
    """Something broke inside the worker and was mended there; it goes on."""

    worker: str
    text: str


class WorkerSpeed(Event, frozen=True):
    """How fast a worker that is busy samples, measured from its heartbeats."""

    worker: str
    tokens_per_s: float
    """Of all its answers together."""
    steps_per_s: float = 0.0
    """Of one answer among few; 0: not known."""


class PartialReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lease since its last report: answer positions start .. start + num_tokens - 1."""

    lease_id: int
    start: int
    num_tokens: int
    first_version: int = NO_VERSION
    """Version of the first of these tokens; -1 where there are none."""
    last_version: int = NO_VERSION


class ProgressReported(Event, frozen=True):
    """Partial work (messages.Progress)."""

    worker: str
    items: tuple[PartialReport, ...]


class SampleReported(Event, frozen=True):
    """A finished and scored sample (messages.SampleFinished), possibly late or a duplicate."""

    worker: str
    lease_id: int
    group_id: int
    sample_index: int
    num_tokens: int
    """Sampled tokens."""
    first_version: int
    last_version: int
    verdict_kind: VerdictKind
    value: float | None = None
    """Raw reward where verdict_kind is "scored"."""
    failed_in: str = ""
    """Scorer that gave no score, where it is known."""
    reason: str = ""
    """Why there is no score, in words."""


class LeaseReturned(Event, frozen=True):
    """A lease given back unfinished (messages.SampleReturned); `part` holds what had not been reported yet."""

    worker: str
    part: PartialReport
    reason: str


class WorkerReleased(Event, frozen=True):
    """The worker has released its engine's memory, as it was told to; it has no version any more."""

    worker: str
    num_bytes: int


class BatchRequested(Event, frozen=True):
    """The trainer wants the batch of `step`; it may ask one step ahead, and again for a step it already got."""

    step: int


class Published(Event, frozen=True):
    """The trainer published `version`; after the starting version this also says that step `version` is done."""

    version: int
    lineage: str
    manifest_path: str


class CheckpointTaken(Event, frozen=True):
    """A checkpoint of `version` is complete."""

    version: int
    path: str


class TrainerLost(Event, frozen=True):
    """The trainer died for good; the run ends as failed and can be resumed."""

    reason: str


class TrainerRestarted(Event, frozen=True):
    """The trainer died and is started again from the checkpoint of `checkpoint_version`, under a new lineage (law 4).

    batches: as recorded, of the steps after that version: they are replayed in order. Nothing of the dead trainer is
    heard after this event.
    """

    reason: str
    lineage: str
    checkpoint_version: int
    batches: tuple[BatchRecord, ...]


class StopRequested(Event, frozen=True):
    """Finish the running step, save, end (Ctrl-C once)."""

    reason: str = "stop requested"


class Tick(Event, frozen=True):
    """Time passed; sent about once a second, so that deadlines and retries come due."""


# ---------------------------------------------------------------- effects


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all effects. `is_ledger`: belongs into the transaction that is committed before anything is sent."""

    is_ledger: ClassVar[bool] = False


class RecordLineage(Effect, frozen=True):
    """A new life of the run, or of its trainer alone, begins at `checkpoint_version`, under these laws."""

    is_ledger: ClassVar[bool] = True
    lineage: str
    checkpoint_version: int
    groups_per_step: int
    group_size: int
    max_staleness: int | None
    on_stale: OnStale
    trainer_died: str = ""
    """Why, where the trainer alone was started again; empty: the whole run was."""


class RecordGroup(Effect, frozen=True):
    """A group is drawn and admitted (law 1). version: loaded by its worker. started: includes this group."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    version: int
    started: int


class StorePartial(Effect, frozen=True):
    """Keep these tokens of an unfinished sample: drop the first `skip` tokens of the reported segment, append the rest.

    start: answer position of the first kept token, equal to the number of tokens the ledger already has.
    """

    is_ledger: ClassVar[bool] = True
    lease_id: int
    group_id: int
    sample_index: int
    start: int
    skip: int
    num_tokens: int
    """Tokens kept now (after skipping)."""


class StoreFinished(Effect, frozen=True):
    """Keep this finished sample; its partial tokens are superseded.

    value: the reward that counts (a policy number for a non-score), None where the sample is not kept.
    For purpose "eval" group_id is the eval row and no token payload needs to be kept.
    """

    is_ledger: ClassVar[bool] = True
    purpose: Purpose
    lease_id: int
    group_id: int
    sample_index: int
    num_tokens: int
    first_version: int
    last_version: int
    verdict_kind: VerdictKind
    value: float | None
    is_kept: bool
    policy: Policy = ""


class DropGroup(Effect, frozen=True):
    """The group is given up.

    reason: stale | timeout | too_few_scores | verdict_<kind> | rejected | lost_too_often | surplus.
    """

    is_ledger: ClassVar[bool] = True
    group_id: int
    reason: str
    detail: str = ""


class FilterGroup(Effect, frozen=True):
    """The group carries no signal: all its rewards equal `value`."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    value: float


class RecordBatch(Effect, frozen=True):
    """These groups are step `step` of `lineage` (for a replay: again, unchanged)."""

    is_ledger: ClassVar[bool] = True
    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool


class RecordCheckpoint(Effect, frozen=True):
    """A checkpoint covers every step up to `version`."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    path: str


class RecordEval(Effect, frozen=True):
    """The evaluation at `version` is complete; values by eval row, None where there was no score."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    kind: EvalKind
    values: tuple[float | None, ...]


class LeaseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One lease to hand out. The shell adds the data row, the seed, and the prefix from the ledger."""

    lease_id: int
    group_id: int
    sample_index: int
    purpose: Purpose
    min_version: int
    prefix_tokens: int
    moved_from: str = ""
    """Worker that handed it back in good order, where one did."""


class SendLeases(Effect, frozen=True):
    """One Lease message to one worker."""

    worker: str
    leases: tuple[LeaseOrder, ...]


class SendAck(Effect, frozen=True):
    """These finished samples are in the ledger, or no longer wanted: the worker may forget them."""

    worker: str
    lease_ids: tuple[int, ...]


class SendCancel(Effect, frozen=True):
    """The worker should stop working on these leases."""

    worker: str
    lease_ids: tuple[int, ...]


class SendRecall(Effect, frozen=True):
    """The worker should hand these leases back with their tokens so far; they go on elsewhere."""

    worker: str
    lease_ids: tuple[int, ...]


class SendVersion(Effect, frozen=True):
    """Announce a version to one worker."""

    worker: str
    version: int
    lineage: str
    manifest_path: str
    is_held: bool = False
    """The worker stages it and waits for SendSwap."""


class SendSwap(Effect, frozen=True):
    """It is the worker's turn to swap in the version it has staged."""

    worker: str
    version: int
    lineage: str


class SendRelease(Effect, frozen=True):
    """The worker gives its engine's memory back until a version is announced to it."""

    worker: str


class EndWorker(Effect, frozen=True):
    """End the worker's process: others wait for what it holds. It is started again within its budget."""

    worker: str
    reason: str


class SendBatch(Effect, frozen=True):
    """The batch of `step`, for the trainer; the shell loads the payloads of the named samples, in this order."""

    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool


class SendNoMoreBatches(Effect, frozen=True):
    """Tell the trainer to save and end after `last_step` (or after the running step if that is later)."""

    last_step: int
    reason: str


class RecordIncident(Effect, frozen=True):
    """Something went wrong and the run goes on; made by the shell of the notes worth remembering. kind: the note's."""

    is_ledger: ClassVar[bool] = True
    kind: str
    text: str


class EvalDone(Effect, frozen=True):
    """An evaluation is complete. values: by eval row, None where there was no score.

    requested_version differs from version where the evaluation had to be pinned anew.
    """

    version: int
    requested_version: int
    kind: EvalKind
    values: tuple[float | None, ...]


class EvalDropped(Effect, frozen=True):
    """An evaluation was given up, and why."""

    version: int
    kind: EvalKind
    reason: str


class PurgePayloads(Effect, frozen=True):
    """Token payloads of steps up to `covered_step` and of dropped or filtered groups may go (`Ledger.purge`)."""

    covered_step: int


class Note(Effect, frozen=True):
    """Something worth a line in the log and a count. kind: a short stable key, e.g. "duplicate", "quarantined"."""

    kind: str
    text: str


class EndRun(Effect, frozen=True):
    """The run is over; shut everything down."""

    status: EndStatus
    reason: str
