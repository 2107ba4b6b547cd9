"""The coordinator: a pure state machine that keeps the invariants. `handle(event, now_s) -> effects`.

Defines the order in which an event is processed and its consequences are settled. It has no I/O, clock, randomness or
payloads.

Decisions by module:
  worker_lifecycle.py  registration and loss of workers
  sample_intake.py     tokens and finished samples
  group_outcome.py     whether a group is ready, filtered or dropped
  batch_selection.py   the groups of a step
  replay_buffer.py     groups of earlier steps that it reuses
  batch_shipping.py    the answer to the trainer's request: a new or a recorded batch
  admission.py         whether another group may start
  leasing.py           what is leased next
  routing.py           which worker receives it, how much credit counts
  migration.py         what moves to an idle worker
  evaluation.py        evaluations at one pinned version
  termination.py       why and how the run ends
  usable_workers.py    whether any worker can still do work
  version_rollout.py   versions on their way to workers: announcements, turns to swap, deadlines
                       (the transition table: worker_version.py)
  wait_reasons.py      waits, as sentences
  rewriting.py         damaged versions that the trainer rewrites
  autoscaling.py       how many workers the run has, within limits
  colocation.py        turns on shared devices (the transition table: handover.py)
  run_state.py         the state (its named parts: run_parts.py)
  restoring.py         the state restored from earlier sessions of the run

Every event is settled in one fixed order: deadlines, overdue groups, the trainer's request, the handover of devices,
evaluations, announcements, leases, migrations, the number of workers, the end. The reasons for the rules:
docs/decisions/0002-coordinator.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from areal_like.errors import UserError
from areal_like.trajectory import NO_VERSION
from controller.coordinator import (
    autoscaling,
    batch_selection,
    batch_shipping,
    colocation,
    evaluation,
    leasing,
    migration,
    restoring,
    rewriting,
    sample_intake,
    termination,
    version_rollout,
    wait_reasons,
    worker_lifecycle,
)
from controller.coordinator.draws import Draws
from controller.coordinator.effects import (
    Effect,
    EndRun,
    PurgePayloads,
    RecordCheckpoint,
    RecordLineage,
)
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    EarlyStopReached,
    Event,
    LeaseReturned,
    ProgressReported,
    Published,
    RunStarted,
    SampleReported,
    StopRequested,
    Tick,
    TrainerLost,
    TrainerRestarted,
    VersionRewritten,
    WorkerDraining,
    WorkerEnded,
    WorkerIncident,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerSpeed,
    WorkerVersionFailed,
    WorkerVersionLoaded,
    WorkerVersionStaged,
)
from controller.coordinator.group_outcome import drop_group
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import Counts, EvaluationUnderWay, LedgerState

QUIET_EVENTS = (SampleReported, ProgressReported, LeaseReturned, WorkerSpeed, BatchRequested,
                WorkerVersionLoaded)  # fmt: skip
"""After these events no worker is notified about versions, except if a turn is passed on (`swap: rolling`) or an
evaluation ends.
"""


class Coordinator:
    """Decides which worker generates which sample, what each step consumes, and when the run ends.

    Use: `Coordinator(settings)` for a fresh run or `Coordinator.restore(settings, ledger.load())`, then
    `handle(RunStarted(lineage=..., checkpoint_version=...), now_s)` before any other event.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self._state = RunState(settings)
        self._is_started = False

    @classmethod
    def restore(cls, settings: CoordinatorSettings, state: LedgerState, draws: Draws | None = None) -> Coordinator:
        """Rebuild the coordinator of an earlier session.

        Args:
            settings: as for a new run; batch size and group size must be those of the record.
            state: content of the ledger.
            draws: chooses the rows of groups, after the rows in the ledger; None: in order.

        Returns:
            A coordinator without leases; workers register again.

        Raises:
            UserError: the settings contradict the record.
        """
        coordinator = cls(settings)
        restoring.remember(coordinator._state, state)
        if draws is not None:
            coordinator._state.groups.draws = draws
        return coordinator

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Process one event.

        Args:
            event: what happened (controller/coordinator/events.py).
            now_s: monotonic time of the event, never less than before.

        Returns:
            Effects for the shell, in order; ledger effects come first and are committed before any message is sent.

        Example:
            >>> effects = coordinator.handle(Tick(), now_s=12.5)
        """
        return self.handle_together((event,), now_s)

    def handle_together(self, events: Sequence[Event], now_s: float) -> list[Effect]:
        """Process events of the same time, settled once: thousands of simulated workers load a version at the same
        time.

        Args:
            events: what happened, in order.
            now_s: monotonic time of all of them.

        Returns:
            As `handle`, for all events together.
        """
        state = self._state
        state.now_s = now_s
        for event in events:
            assert self._is_started != isinstance(event, RunStarted), "RunStarted is the first event, once"
            is_quiet = (
                isinstance(event, QUIET_EVENTS) and not state.evaluations.jobs and self.settings.swap != "rolling"
            )
            self._take(event)
            state.version_check.is_due |= not is_quiet
        if state.phase is not Phase.OVER:
            self._settle()
        return state.take_effects()

    # ------------------------------------------------------------ public state

    def counts(self) -> Counts:
        """Groups by fate; the counts always add up."""
        state = self._state
        groups = state.groups
        return Counts(
            drawn=groups.num_drawn,
            consumed=groups.num_consumed,
            filtered=groups.num_filtered,
            dropped=dict(groups.dropped),
            running=groups.table.num_running,
            ready=groups.table.num_ready,
            samples_finished=groups.num_samples_finished,
        )

    def evaluations(self) -> list[EvaluationUnderWay]:
        """Evaluations in progress, oldest first, without evaluations that no worker has started."""
        jobs = self._state.evaluations.jobs
        return [
            EvaluationUnderWay(version=job.version, num_done=len(job.values), num_rows=job.num_rows)
            for job in jobs
            if job.workers
        ]

    def waits(self) -> list[str]:
        """Current waits as sentences; empty if nothing waits."""
        return wait_reasons.waits(self._state)

    def is_live(self, lease_id: int) -> bool:
        """Return whether a lease is still valid: in a burst of events a later event may end a lease made by an earlier
        one.

        Args:
            lease_id: the number of the lease.

        Returns:
            False once its sample is finished, or was leased to another worker.
        """
        lease = self._state.leases.get(lease_id)
        return lease is not None and not lease.is_void

    def can_spare(self, names: Collection[str]) -> bool:
        """Return whether these rollout workers may be removed permanently.

        Args:
            names: names of the workers.

        Returns:
            True if another worker that the run started exists or will be started. External ones may leave at any time.
        """
        return worker_lifecycle.can_spare(self._state, names)

    @property
    def progress(self) -> int:
        """Counter that increases with every useful event (tokens, samples, versions, batches); for the watchdog."""
        return self._state.progress

    @property
    def is_batch_awaited(self) -> bool:
        """Whether the trainer waits for a batch, so that only samples can bring the run forward."""
        return self._state.phase is Phase.RUNNING and self._state.trainer.requested is not None

    @property
    def version(self) -> int:
        """Newest published version; -1 before the first."""
        return self._state.trainer.version

    @property
    def shipped(self) -> int:
        """Last step whose batch is recorded."""
        return self._state.trainer.shipped

    @property
    def trained(self) -> int:
        """Version the trainer has reached: below `version` while it replays; -1 before its first message."""
        return self._state.trainer.trained

    @property
    def is_over(self) -> bool:
        """EndRun was returned; later events only store and acknowledge what is reported."""
        return self._state.phase is Phase.OVER

    # ------------------------------------------------------------ events

    def _take(self, event: Event) -> None:
        state = self._state
        match event:
            case ProgressReported():
                sample_intake.take_progress(state, event)
            case SampleReported():
                sample_intake.take_finished(state, event)
            case LeaseReturned():
                sample_intake.take_returned(state, event)
            case WorkerJoined():
                worker_lifecycle.join(state, event)
            case WorkerLost():
                worker_lifecycle.lose(state, event)
            case WorkerEnded():
                worker_lifecycle.end(state, event)
            case WorkerVersionStaged():
                version_rollout.version_staged(state, event)
            case WorkerDraining():
                worker_lifecycle.drain(state, event)
            case WorkerIncident():
                state.note("incident", f"{event.worker}: {event.text}")
            case WorkerSpeed():
                worker_lifecycle.take_speed(state, event)
            case WorkerVersionLoaded():
                version_rollout.version_loaded(state, event)
            case WorkerVersionFailed():
                version_rollout.version_failed(state, event)
            case VersionRewritten():
                rewriting.rewritten(state, event)
            case WorkerReleased():
                colocation.released(state, event)
            case BatchRequested():
                state.trainer.requested = event.step
            case Published():
                self._take_version(event)
            case CheckpointTaken():
                self._take_checkpoint(event)
            case TrainerRestarted():
                self._restart_trainer(event)
            case TrainerLost():
                self._end_now(f"the trainer is lost: {event.reason}")
            case StopRequested():
                termination.begin(state, "stopped", event.reason)
            case EarlyStopReached():
                termination.begin(state, "completed", event.reason)
            case RunStarted():
                self._start(event)
            case Tick():
                pass
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def _start(self, event: RunStarted) -> None:
        state = self._state
        trainer = state.trainer
        if not 0 <= event.checkpoint_version <= trainer.shipped:
            raise UserError(
                f"checkpoint {event.checkpoint_version} is newer than the last step in the ledger, {trainer.shipped}",
                where="ledger",
                remedy="resume with the run folder's own ledger and checkpoints",
            )
        self._is_started = True
        self._begin_lineage(event.lineage, event.checkpoint_version)
        # Steps up to the checkpoint are in its weights. Later versions are trained and evaluated again.
        trainer.recorded = {step: batch for step, batch in trainer.recorded.items() if step > trainer.base}
        state.evaluations.done = {version: () for version in state.evaluations.done if version <= trainer.base}
        state.start_lease_ids()
        for group in batch_selection.surplus_groups(state):
            drop_group(state, group, "surplus", "the staleness bound was reduced")

    def _restart_trainer(self, event: TrainerRestarted) -> None:
        """Restart the trainer from a checkpoint; workers continue with their versions, as far as the invariants
        allow.
        """
        state = self._state
        trainer = state.trainer
        if not 0 <= event.checkpoint_version <= trainer.shipped:
            raise AssertionError(f"checkpoint {event.checkpoint_version} is not in the range 0 to {trainer.shipped}")
        self._begin_lineage(event.lineage, event.checkpoint_version, trainer_died=event.reason)
        trainer.recorded = {batch.step: batch for batch in event.batches}
        # Requests of the lost trainer are void, and its successor is notified of the end again. Its newest version
        # stays the workers' target, but the files may be deleted: nothing is announced until it is published again.
        trainer.requested, state.ending.is_trainer_notified, trainer.manifest_path = None, False, ""
        trainer.trained, trainer.rewrite = NO_VERSION, None
        colocation.trainer_died(state)
        if state.phase is Phase.FINISHING:
            termination.trainer_died(state)
        state.progress += 1
        num_behind = trainer.shipped - trainer.base
        behind = f", {num_behind} recorded batches are replayed" if num_behind > 0 else ""
        text = f"the trainer restarts from version {trainer.base}{behind} ({event.reason})"
        state.note("trainer_restarted", text)

    def _begin_lineage(self, lineage: str, base: int, *, trainer_died: str = "") -> None:
        state, settings = self._state, self.settings
        trainer = state.trainer
        trainer.lineage, trainer.base = lineage, base
        trainer.lineages.add(lineage)
        trainer.replay_until, trainer.sent = trainer.shipped, base
        trainer.replayed.clear()
        trainer.checkpoints = [version for version in trainer.checkpoints if version <= base]
        state.emit(
            RecordLineage(
                lineage=lineage,
                checkpoint_version=base,
                groups_per_step=settings.groups_per_step,
                group_size=settings.group_size,
                max_staleness=settings.bound,
                on_stale=settings.on_stale,
                passes_per_batch=settings.passes_per_batch,
                least_groups=None if settings.max_attempts is None else settings.least_groups,
                replay_groups=None if settings.replay is None else settings.replay.groups_per_step,
                replay_max_age=None if settings.replay is None else settings.replay.max_age,
                replay_max_reuses=None if settings.replay is None else settings.replay.max_reuses,
                trainer_died=trainer_died,
            )
        )

    def _take_version(self, event: Published) -> None:
        """Handle a new version; or, from a trainer that replays, a version older than the workers'."""
        state = self._state
        trainer = state.trainer
        is_news = event.version > trainer.trained and event.version >= trainer.base
        is_untrained = event.version > max(trainer.sent, trainer.base)
        is_withheld = colocation.is_withheld(state.devices, event.version)
        if event.lineage != trainer.lineage or not is_news or is_untrained or is_withheld:
            state.note("ignored", f"version {event.version} of lineage {event.lineage} was published out of order")
            return
        trainer.trained = event.version
        trainer.recorded = {step: batch for step, batch in trainer.recorded.items() if step > event.version}
        state.progress += 1
        colocation.published(state)
        evaluation.published_again(state, event)
        if event.version < trainer.version:
            return  # a replay: workers have a newer version and never load an older one
        is_new, trainer.rewrite = event.version > trainer.version, None
        trainer.version, trainer.version_lineage = event.version, event.lineage
        trainer.manifest_path = event.manifest_path
        version_rollout.offer_again(state)
        if is_new:
            evaluation.on_published(state)

    def _take_checkpoint(self, event: CheckpointTaken) -> None:
        state = self._state
        trainer = state.trainer
        if event.version in trainer.checkpoints or event.version > trainer.trained:
            state.note("ignored", f"checkpoint {event.version} was reported twice or out of order")
            return
        keep = self.settings.keep_checkpoints
        trainer.checkpoints = [*trainer.checkpoints, event.version][-keep:]
        state.progress += 1
        recorded = RecordCheckpoint(
            version=event.version, lineage=trainer.lineage, path=event.path, digest=event.digest
        )
        state.emit(recorded)
        # With fewer than `keep` checkpoints a resume may have to start from step 0, which needs every payload.
        covered = trainer.checkpoints[0] if len(trainer.checkpoints) == keep else 0
        # A step after it may reuse a group that was generated for one of the `max_age` steps before.
        reuse = self.settings.replay
        state.emit(PurgePayloads(covered_step=covered if reuse is None else max(0, covered - reuse.max_age)))

    def _end_now(self, reason: str) -> None:
        state = self._state
        if state.phase is not Phase.OVER:
            state.phase = Phase.OVER
            state.emit(EndRun(status="failed", reason=reason))

    # ------------------------------------------------------------ consequences

    def _settle(self) -> None:
        state = self._state
        for group in state.groups.table.expired(state.now_s):
            drop_group(state, group, "timeout", f"unfinished after {self.settings.group_timeout_s:g} s")
        # Before the trainer is served, since an overdue group must not get into its batch; and after a new batch, which
        # brings all deadlines one step nearer. A batch that is sent again changes no deadline.
        self._drop_overdue()
        if batch_shipping.serve_trainer(state):
            self._drop_overdue()
        # The handover decides whether engines may be used at all, pins decide what is announced to a worker, and both
        # what it is leased: hence this order.
        colocation.advance(state)
        evaluation.advance(state)
        if state.version_check.is_due or state.evaluations.jobs or state.now_s >= state.version_check.due_s:
            version_rollout.expire_loads(state)
            rewriting.expire_loads(state)
            version_rollout.announce(state)
            version_rollout.grant_turn(state)
            state.version_check.due_s, state.version_check.is_due = version_rollout.next_due_s(state), False
        leasing.assign(state)
        migration.advance(state)
        autoscaling.advance(state)
        termination.advance(state)

    def _drop_overdue(self) -> None:
        for group in batch_selection.overdue_groups(self._state):
            drop_group(self._state, group, "stale", f"too old for step {self._state.trainer.next_step}")
