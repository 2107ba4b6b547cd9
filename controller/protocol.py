"""The vocabulary of the coordinator: events in, effects out, and what the ledger gives back after a crash.

Owns: frozen types only. Refuses: behaviour, token payloads (they never enter the logic: events carry counts and versions,
effects name whose payload is meant, and the shell has the message at hand).

Contract with the shell (`controller/server.py`):
  1. `effects = coordinator.handle(event, now_s)`; in the list all effects with `is_ledger` come first.
  2. The ledger effects of one or several handled events are applied in one transaction, with their payloads, and committed.
  3. Only then the other effects are carried out, in order. A crash between 2 and 3 is safe, between 1 and 2 as well.
`StorePartial` and `StoreFinished` always refer to the payload of the very event that was handled (found by `lease_id`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from areal_like.messages import Purpose
from areal_like.trajectory import NO_VERSION
from areal_like.verdict import VerdictKind

EvalKind = Literal["baseline", "periodic", "final"]
EndStatus = Literal["completed", "exhausted", "stopped", "failed"]
"""`completed`: num_steps done. `exhausted`: the data ran out first, in good order. `stopped`: asked to. `failed`: see reason."""
OnStale = Literal["wait", "drop", "keep"]
OnFailure = Literal["drop_sample", "drop_group"] | float
Mode = Literal["async", "one_step_off", "sync"]


# ---------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""


class RunStarted(Event):
    """First event of every process life. `lineage` is new at each start ("l0", "l1", ...).

    checkpoint_version: the version the trainer starts from; recorded batches after it are replayed (law 4).
    """

    lineage: str
    checkpoint_version: int = 0


class WorkerJoined(Event):
    """A rollout worker said Hello (for the first time, again after silence, or as a new process of the same name)."""

    worker: str
    incarnation: str
    capacity: int


class WorkerLost(Event):
    """A rollout worker is silent, dead or said Goodbye; its leases go back with the tokens it had reported.

    is_permanent: no restart will come. A lost worker is heard again only after a new `WorkerJoined` (same incarnation
    allowed); its finished samples are welcome at any time.
    """

    worker: str
    reason: str
    is_permanent: bool = False
    incarnation: str | None = None
    """Which process was lost, if known: the loss of an older one than the last that joined is ignored."""


class WorkerVersionLoaded(Event):
    """The worker samples with `version` from now on."""

    worker: str
    version: int
    lineage: str


class WorkerVersionFailed(Event):
    """The worker could not load `version` and goes on with its old one."""

    worker: str
    version: int
    lineage: str
    reason: str


class PartialReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one lease since its last report: answer positions start .. start + num_tokens - 1."""

    lease_id: int
    start: int
    num_tokens: int
    first_version: int = NO_VERSION
    """Version of the first of these tokens; -1 where there are none."""
    last_version: int = NO_VERSION


class ProgressReported(Event):
    """Partial work (messages.Progress)."""

    worker: str
    items: tuple[PartialReport, ...]


class SampleReported(Event):
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


class LeaseReturned(Event):
    """A lease given back unfinished (messages.SampleReturned); `part` holds what had not been reported yet."""

    worker: str
    part: PartialReport
    reason: str


class BatchRequested(Event):
    """The trainer wants the batch of `step`; it may ask one step ahead, and again for a step it already got."""

    step: int


class Published(Event):
    """The trainer published `version`; for versions after the starting one this also says that step `version` is done."""

    version: int
    lineage: str
    manifest_path: str


class CheckpointTaken(Event):
    """A checkpoint of `version` is complete."""

    version: int
    path: str


class TrainerLost(Event):
    """The trainer died; the run ends as failed and can be resumed."""

    reason: str


class StopRequested(Event):
    """Finish the running step, save, end (Ctrl-C once)."""

    reason: str = "stop requested"


class Tick(Event):
    """Time passed; sent about once a second, so that deadlines and retries come due."""


# ---------------------------------------------------------------- effects


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all effects. `is_ledger`: belongs into the transaction that is committed before anything is sent."""

    is_ledger: ClassVar[bool] = False


class RecordLineage(Effect):
    """A new life of the run begins at `checkpoint_version`, under these laws."""

    is_ledger: ClassVar[bool] = True
    lineage: str
    checkpoint_version: int
    groups_per_step: int
    group_size: int
    max_staleness: int | None
    on_stale: OnStale


class RecordGroup(Effect):
    """A group is drawn and admitted: `version` is the loaded one of the worker, `started` includes this group (law 1)."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    version: int
    started: int


class StorePartial(Effect):
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


class StoreFinished(Effect):
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


class DropGroup(Effect):
    """The group is given up. reason: stale | timeout | too_few_scores | verdict_* | rejected | lost_too_often | surplus."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    reason: str
    detail: str = ""


class FilterGroup(Effect):
    """The group carries no signal: all its rewards equal `value`."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    value: float


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch: which of its samples are kept, and its first version."""

    group_id: int
    sample_indices: tuple[int, ...]
    first_version: int


class RecordBatch(Effect):
    """These groups are step `step` of `lineage` (for a replay: again, unchanged)."""

    is_ledger: ClassVar[bool] = True
    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool


class RecordCheckpoint(Effect):
    """A checkpoint covers every step up to `version`."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    path: str


class RecordEval(Effect):
    """The evaluation at `version` is complete; values by eval row, None where there was no score."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    kind: EvalKind
    values: tuple[float | None, ...]


class LeaseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One lease to hand out. The shell adds the data row, the seed, and the prefix of `prefix_tokens` from the ledger."""

    lease_id: int
    group_id: int
    sample_index: int
    purpose: Purpose
    min_version: int
    prefix_tokens: int


class SendLeases(Effect):
    """One Lease message to one worker."""

    worker: str
    leases: tuple[LeaseOrder, ...]


class SendAck(Effect):
    """These finished samples are in the ledger, or no longer wanted: the worker may forget them."""

    worker: str
    lease_ids: tuple[int, ...]


class SendCancel(Effect):
    """The worker should stop working on these leases."""

    worker: str
    lease_ids: tuple[int, ...]


class SendVersion(Effect):
    """Announce a version to one worker."""

    worker: str
    version: int
    lineage: str
    manifest_path: str


class SendBatch(Effect):
    """The batch of `step`, for the trainer; the shell loads the payloads of the named samples, in this order."""

    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool


class SendNoMoreBatches(Effect):
    """Tell the trainer to save and end after `last_step` (or after the running step if that is later)."""

    last_step: int
    reason: str


class EvalDone(Effect):
    """An evaluation is complete. values: by eval row, None where there was no score.

    requested_version differs from version where the evaluation had to be pinned anew.
    """

    version: int
    requested_version: int
    kind: EvalKind
    values: tuple[float | None, ...]


class EvalDropped(Effect):
    """An evaluation was given up, and why."""

    version: int
    kind: EvalKind
    reason: str


class PurgePayloads(Effect):
    """Token payloads of steps up to `covered_step` and of dropped or filtered groups may go (`Ledger.purge`)."""

    covered_step: int


class Note(Effect):
    """Something worth a line in the log and a count. kind: a short stable key, e.g. "duplicate", "quarantined"."""

    kind: str
    text: str


class EndRun(Effect):
    """The run is over; shut everything down."""

    status: EndStatus
    reason: str


# ---------------------------------------------------------------- what the ledger gives back


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one sample of a live group. Partial: num_tokens tokens are stored. Finished: verdict is in."""

    sample_index: int
    num_tokens: int
    first_version: int
    last_version: int
    is_finished: bool = False
    is_kept: bool = False
    value: float | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live group: drawn, and neither shipped nor dropped nor filtered. `samples` lists only those with anything stored."""

    group_id: int
    version: int
    samples: tuple[SampleRecord, ...]


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded batch (the newest recording where a step was replayed)."""

    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was reported complete."""

    version: int
    lineage: str
    path: str


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the coordinator needs to go on after a crash."""

    num_lives: int
    """How often the run was started so far (rows of RecordLineage)."""
    num_drawn: int
    num_filtered: int
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    live: tuple[GroupRecord, ...]
    """By group id."""
    batches: tuple[BatchRecord, ...]
    """By step, 1, 2, ... without holes."""
    checkpoints: tuple[CheckpointRecord, ...]
    """Oldest first, in the order they were reported."""
    evals: tuple[int, ...]
    """Versions whose evaluation is complete."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by fate; drawn = consumed + filtered + sum(dropped) + in_flight at any time (law 4)."""

    drawn: int
    consumed: int
    """Groups in recorded batches of the surviving lineage."""
    filtered: int
    dropped: dict[str, int]
    running: int
    """Admitted, not all samples finished."""
    ready: int
    """Complete, waiting for a step."""
    samples_finished: int
    """Training samples whose verdict came in during this life of the process."""

    @property
    def in_flight(self) -> int:
        """running + ready."""
        return self.running + self.ready

    def add_up(self) -> bool:
        """drawn = consumed + filtered + dropped + in flight."""
        return self.drawn == self.consumed + self.filtered + sum(self.dropped.values()) + self.in_flight
