"""Effects that the coordinator returns for the shell to carry out.

Frozen types only: no behaviour and no token payloads (effects name the payload; the shell has the message).

Contract with the shell (`controller/runtime/server.py`):
  1. `effects = coordinator.handle(event, now_s)`; in the list all effects with `is_ledger` come first.
  2. The ledger effects of one or several handled events, with their payloads, are applied and committed as one.
  3. Only then the other effects are carried out, in order. A crash between 1 and 2, or 2 and 3, loses nothing that was
  acknowledged. Leases of `SendLeases` are only sent if they are `Coordinator.is_live` by then: a later event of the
  burst may have ended some.
  4. If a message cannot be sent to a worker, the shell raises `WorkerLost`, and `WorkerJoined` when the worker is
  reachable again.

`StorePartial` and `StoreFinished` always refer to the payload of the event that was handled (found by `lease_id`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from areal_like.staleness import OnStale
from areal_like.wire.messages import Purpose
from controller.coordinator.draws import SkippedDraw
from controller.coordinator.events import EvalKind, Policy
from controller.coordinator.notes import NoteKind
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.snapshot import (
    BatchGroup,
)

EndStatus = Literal["completed", "exhausted", "stopped", "failed"]
"""`completed`: num_steps done. `exhausted`: the data was used up before. `stopped`: by request. `failed`."""


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all effects. `is_ledger`: part of the transaction that is committed before any message is sent."""

    is_ledger: ClassVar[bool] = False


class RecordLineage(Effect, frozen=True):
    """A new life of the run, or of its trainer alone, begins at `checkpoint_version`, under these settings."""

    is_ledger: ClassVar[bool] = True
    lineage: str
    checkpoint_version: int
    groups_per_step: int
    group_size: int
    max_staleness: int | None
    on_stale: OnStale
    passes_per_batch: int = 1
    """How often each sample of a step is trained on in it."""
    least_groups: int | None = None
    """What a step takes at least; None: groups_per_step."""
    replay_groups: int | None = None
    """Most reused groups of a step; None, as for the next two: nothing is reused (`replay_buffer`)."""
    replay_max_age: int | None = None
    replay_max_reuses: int | None = None
    trainer_died: str = ""
    """Why, where the trainer alone was started again; empty: the whole run was."""


class RecordGroup(Effect, frozen=True):
    """A group is drawn and admitted (`bounded-admission`). version: loaded by its worker. started: includes
    this group.
    """

    is_ledger: ClassVar[bool] = True
    group_id: int
    version: int
    started: int
    draw: int | None = None
    """Position in the draw order; None: that of the group's number."""


class RecordSkips(Effect, frozen=True):
    """These positions of the draw order were passed over; no group has them."""

    is_ledger: ClassVar[bool] = True
    draws: tuple[SkippedDraw, ...]


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
    """Store this finished sample, which replaces its partial tokens.

    outcome: as reported. value: the effective reward (a configured number for a missing score), None if the sample is
    not kept. For purpose "eval" no token payload needs to be kept.
    """

    is_ledger: ClassVar[bool] = True
    purpose: Purpose
    outcome: SampleOutcome
    value: float | None
    is_kept: bool
    policy: Policy = ""


class DropGroup(Effect, frozen=True):
    """Drop the group.

    reason: stale | timeout | too_few_scores | verdict_<kind> | rejected | refused | lost_too_often | surplus.
    """

    is_ledger: ClassVar[bool] = True
    group_id: int
    reason: str
    detail: str = ""


class FilterGroup(Effect, frozen=True):
    """Filter the group: all its rewards equal `value`, so it has no signal."""

    is_ledger: ClassVar[bool] = True
    group_id: int
    value: float


class RecordBatch(Effect, frozen=True):
    """Record these groups as step `step` of `lineage` (again and unchanged in a replay)."""

    is_ledger: ClassVar[bool] = True
    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool
    reused: tuple[BatchGroup, ...] = ()
    """Groups of earlier steps, which keep their fate."""


class RecordCheckpoint(Effect, frozen=True):
    """A checkpoint covers every step up to `version`."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    path: str
    digest: str = ""
    """SHA-256 of its manifest; empty: unknown."""


class RecordEval(Effect, frozen=True):
    """Record the complete evaluation at `version`; values by eval row, None without a score."""

    is_ledger: ClassVar[bool] = True
    version: int
    lineage: str
    kind: EvalKind
    values: tuple[float | None, ...]


class LeaseOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One lease to send. The shell adds the data row, the seed, and the prefix from the ledger."""

    lease_id: int
    group_id: int
    sample_index: int
    purpose: Purpose
    min_version: int
    prefix_tokens: int
    draw: int = 0
    """Position in the draw order of training rows."""
    moved_from: str = ""
    """Worker that returned it gracefully, if any."""


class SendLeases(Effect, frozen=True):
    """One Lease message to one worker."""

    worker: str
    leases: tuple[LeaseOrder, ...]


class SendAck(Effect, frozen=True):
    """Acknowledge finished samples that are in the ledger or no longer needed: the worker may delete them."""

    worker: str
    lease_ids: tuple[int, ...]


class SendCancel(Effect, frozen=True):
    """The worker should stop working on these leases."""

    worker: str
    lease_ids: tuple[int, ...]


class SendRecall(Effect, frozen=True):
    """Recall these leases: the worker returns them with their tokens so far, and they continue on another worker."""

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
    incarnation: str = ""
    """The process that it is addressed to. Another process of the same name, which the coordinator does not know yet,
    must not receive it: it would use memory that is not accounted for.
    """


class SendSwap(Effect, frozen=True):
    """Grant the worker its turn to swap in the staged version."""

    worker: str
    version: int
    lineage: str


class SendRelease(Effect, frozen=True):
    """Request the worker to release its engine's memory until a version is announced to it. Its answer contains
    `number`.
    """

    worker: str
    number: int
    incarnation: str = ""
    """The process that it is addressed to. A successor has no open request, and would not be ended if the release never
    completed.
    """


class EndWorker(Effect, frozen=True):
    """End the worker's process, because others wait for its memory. It is restarted within its restart limit."""

    worker: str
    reason: str


class AddWorker(Effect, frozen=True):
    """Start one more rollout worker (autoscaling.py). max_workers: not if the run has as many that it started,
    including those that have not registered yet."""

    max_workers: int


class RetireWorker(Effect, frozen=True):
    """Drain this process of a rollout worker permanently (autoscaling.py)."""

    worker: str
    incarnation: str


class SendBatch(Effect, frozen=True):
    """The batch of `step`, for the trainer; the shell loads the payloads of the named samples, in this order."""

    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    is_replay: bool
    reused: tuple[BatchGroup, ...] = ()


class SendRewrite(Effect, frozen=True):
    """Request the trainer to rewrite `version` completely, because its files are damaged."""

    version: int
    lineage: str


class SendNoMoreBatches(Effect, frozen=True):
    """Notify the trainer to save and exit after `last_step` (or after the current step if that is later)."""

    last_step: int
    reason: str


class RecordIncident(Effect, frozen=True):
    """Record a problem that did not end the run; made by the shell from notes that are stored in the ledger. kind: the
    note's.
    """

    is_ledger: ClassVar[bool] = True
    kind: NoteKind
    text: str


class EvalDone(Effect, frozen=True):
    """An evaluation is complete. values: by eval row, None without a score.

    requested_version differs from version if the evaluation had to be pinned again.
    """

    version: int
    requested_version: int
    kind: EvalKind
    values: tuple[float | None, ...]


class EvalDropped(Effect, frozen=True):
    """An evaluation was dropped, with the reason."""

    version: int
    kind: EvalKind
    reason: str


class PurgePayloads(Effect, frozen=True):
    """Token payloads of steps up to `covered_step` and of dropped or filtered groups may be deleted
    (`Ledger.purge`).
    """

    covered_step: int


class Note(Effect, frozen=True):
    """An event for the log and a count; further handling of each kind is defined in notes.py."""

    kind: NoteKind
    text: str


class EndRun(Effect, frozen=True):
    """The run is over: shut down all processes."""

    status: EndStatus
    reason: str
