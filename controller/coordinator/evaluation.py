"""Evaluations at one pinned version, while training rollouts continue.

Manages `EvalJob`s, the workers pinned to them (which are notified of no newer version until the evaluation is done) and
their results. Rows, texts and averages are handled by the shell.

An evaluation never prevents a run from ending: if its version cannot be loaded any more, it is pinned again to the
newest version or dropped with a reason, and it has a wall-clock deadline.

Baseline and final evaluation use all workers, periodic ones a single worker.
"""

from __future__ import annotations

import heapq

from controller.coordinator.effects import EvalDone, EvalDropped, RecordEval, StoreFinished
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.events import EvalKind, LeaseReturned, Published, SampleReported
from controller.coordinator.notes import NoteKind
from controller.coordinator.run_parts import EvaluationState
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.worker import Lease, Worker

MAX_WAITING = 2
"""Maximum periodic evaluations without a worker; beyond it the oldest is dropped."""


def request(state: RunState, kind: EvalKind) -> None:
    """Evaluate the newest version."""
    trainer = state.trainer
    num_rows = state.settings.num_rows(kind)
    job = EvalJob(
        trainer.version,
        trainer.version,
        trainer.manifest_path,
        trainer.version_lineage,
        kind,
        num_rows,
        list(range(num_rows)),
    )
    state.evaluations.jobs.append(job)
    waiting = [job for job in state.evaluations.jobs if not job.workers and job.kind == "periodic"]
    for job in waiting[: max(0, len(waiting) - MAX_WAITING)]:
        drop(state, job, "evaluations are falling behind training")


def on_published(state: RunState) -> None:
    """Start an evaluation of the version just published if one is due."""
    settings, version = state.settings, state.trainer.version
    if not settings.num_eval_rows or version in state.evaluations.done or state.phase is not Phase.RUNNING:
        return
    is_last = version >= settings.num_steps and settings.eval_at_end
    if version == 0:
        if settings.eval_at_start:
            request(state, "baseline")
    elif (
        settings.eval_every_steps
        and settings.num_rows("periodic")
        and version % settings.eval_every_steps == 0
        and not is_last
    ):
        request(state, "periodic")


def published_again(state: RunState, event: Published) -> None:
    """Handle that a replaying trainer has published this version again, so that it is available."""
    for job in state.evaluations.jobs:
        if job.version == event.version:
            job.manifest_path, job.lineage = event.manifest_path, event.lineage


def request_final(state: RunState) -> None:
    """Evaluate the last version, reusing existing results."""
    if not (state.settings.num_eval_rows and state.settings.eval_at_end):
        return
    version = state.trainer.version
    values = state.evaluations.done.get(version)
    for job in state.evaluations.jobs:
        if job.version == version:
            num_rows = state.settings.num_rows("final")
            for row in range(job.num_rows, num_rows):
                heapq.heappush(job.pending, row)
            job.kind, job.num_rows = "final", num_rows
            return
    if values and len(values) == state.settings.num_rows("final"):
        state.emit(EvalDone(version=version, requested_version=version, kind="final", values=values))
    else:
        request(state, "final")


# ---------------------------------------------------------------- pins


def advance(state: RunState) -> None:
    """Pin workers to evaluations that need them, and drop evaluations past their deadline."""
    for job in list(state.evaluations.jobs):
        if job.workers and state.now_s > job.deadline_s:
            drop(state, job, f"no result for {state.settings.group_timeout_s:g} s")
        elif job.wants_all or not job.workers:
            _find_workers(state, job)


def _find_workers(state: RunState, job: EvalJob) -> None:
    usable = [worker for worker in state.workers.values() if worker.is_working]
    able = [worker for worker in usable if _can_load(worker, job.version)]
    eligible = [worker for worker in able if worker.weights.pin is None]
    if not job.wants_all:
        eligible = sorted(eligible, key=lambda worker: (-worker.weights.version, -worker.free))[:1]
    for worker in eligible:
        if not job.workers:
            job.deadline_s = state.now_s + state.settings.group_timeout_s
        worker.weights.pin_to(job)
        state.workers.changed(worker)
        job.workers.add(worker.name)
    # Not while no worker is usable: a worker that registers later may be able to load the version.
    if not job.workers and usable and not able:
        _repin(state, job)


def _can_load(worker: Worker, version: int) -> bool:
    """Return whether the worker can load the version. A worker never loads an older version, or one that it failed to
    load.
    """
    weights = worker.weights
    return max(weights.announced, weights.version) <= version and version > weights.unloadable


def _repin(state: RunState, job: EvalJob) -> None:
    """Pin the evaluation to the newest version, or drop it, because no worker can load its version."""
    trainer = state.trainer
    taken = (
        any(other.version == trainer.version for other in state.evaluations.jobs)
        or trainer.version in state.evaluations.done
    )
    if job.kind == "baseline" or taken:
        drop(state, job, f"no worker can load version {job.version} any more")
        return
    state.note("eval_repinned", f"evaluation of version {job.version} is moved to version {trainer.version}")
    _reset(state, job)
    job.version, job.manifest_path, job.lineage = (
        trainer.version,
        trainer.manifest_path,
        trainer.version_lineage,
    )
    _find_workers(state, job)


def _reset(state: RunState, job: EvalJob) -> None:
    state.cancel([state.leases[lease_id] for lease_id in sorted(job.lease_ids)])
    for name in job.workers:
        _unpin(state, state.workers[name])
    job.workers.clear()
    job.lease_ids.clear()
    job.held.clear()
    job.values.clear()
    job.pending = list(range(job.num_rows))


def unpin(state: RunState, worker: Worker) -> None:
    """Unpin a worker that is lost, drained or quarantined: its rows start again on other workers."""
    job = worker.weights.pin
    if job is None:
        return
    _unpin(state, worker)
    job.workers.discard(worker.name)
    for lease_id in sorted(job.lease_ids):
        lease = state.leases[lease_id]
        if lease.worker == worker.name:
            _requeue(state, job, lease)
    _finish_if_done(state, job)


def _unpin(state: RunState, worker: Worker) -> None:
    worker.weights.unpin()
    state.workers.changed(worker)


def drop(state: RunState, job: EvalJob, reason: str) -> None:
    """Drop the evaluation."""
    _reset(state, job)
    state.evaluations.jobs.remove(job)
    state.emit(EvalDropped(version=job.requested_version, kind=job.kind, reason=reason))
    state.note("eval_dropped", f"evaluation of version {job.requested_version} given up: {reason}")


# ---------------------------------------------------------------- leases and results


def lease_row(state: RunState, worker: Worker) -> Lease | None:
    """Lease one eval row to a worker that is pinned and has the version loaded."""
    job = worker.weights.pin
    row = job.next_row() if job is not None else None
    if job is None or row is None:
        return None
    lease = state.new_lease(worker, "eval", row, 0, job.version)
    job.lease_ids.add(lease.lease_id)
    job.held[worker.name] += 1
    return lease


def _release(state: RunState, job: EvalJob, lease: Lease) -> None:
    state.release(lease)
    job.lease_ids.discard(lease.lease_id)
    job.held[lease.worker] -= 1


def _requeue(state: RunState, job: EvalJob, lease: Lease) -> None:
    _release(state, job, lease)
    row = lease.group_id
    job.losses[row] += 1
    if job.losses[row] > state.settings.max_sample_losses:
        job.values[row] = None
    else:
        heapq.heappush(job.pending, row)


def _job_of(evaluations: EvaluationState, lease: Lease) -> EvalJob:
    return next(job for job in evaluations.jobs if lease.lease_id in job.lease_ids)


def take_result(state: RunState, lease: Lease, event: SampleReported) -> None:
    """Handle an eval row that is answered and scored. A missing score stays None: errors are not zeros
    (`verdicts-not-zeros`).
    """
    job, outcome = _job_of(state.evaluations, lease), event.outcome
    if not outcome.first_version == outcome.last_version == job.version:
        state.note(
            "refused", f"{event.worker}: eval row {outcome.group_id} mixes versions; version {job.version} is required"
        )
        _requeue(state, job, lease)
    else:
        _release(state, job, lease)
        value = outcome.value if outcome.verdict_kind == "scored" else None
        job.values[outcome.group_id] = value
        job.deadline_s = state.now_s + state.settings.group_timeout_s
        state.progress += 1
        state.emit(StoreFinished(purpose="eval", outcome=outcome, value=value, is_kept=value is not None))
    _finish_if_done(state, job)


def take_back(state: RunState, lease: Lease, event: LeaseReturned) -> None:
    """Handle an eval lease returned unfinished: rejected and refused rows have no value, others start again."""
    job = _job_of(state.evaluations, lease)
    if event.reason in ("rejected", "refused"):
        _release(state, job, lease)
        job.values[lease.group_id] = None
        kind: NoteKind = "eval_refused" if event.reason == "refused" else "eval_rejected"
        state.note(kind, f"eval row {lease.group_id} was {event.reason}: {event.detail}")
    else:
        _requeue(state, job, lease)
    _finish_if_done(state, job)


def _finish_if_done(state: RunState, job: EvalJob) -> None:
    if len(job.values) < job.num_rows or job not in state.evaluations.jobs:
        return
    values = tuple(job.values[row] for row in range(job.num_rows))
    _reset(state, job)
    state.evaluations.jobs.remove(job)
    state.evaluations.done[job.version] = values
    state.progress += 1
    state.emit(RecordEval(version=job.version, lineage=state.trainer.lineage, kind=job.kind, values=values))
    state.emit(EvalDone(version=job.version, requested_version=job.requested_version, kind=job.kind, values=values))
