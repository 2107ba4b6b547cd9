"""Versions between their announcement and their use: announcements, turns to swap, and deadlines.

Raises the events of a worker's version; the states are in worker_version.py. With `swap: rolling` a turn is passed on
when its worker has swapped, failed, exited or missed the deadline.
"""

from __future__ import annotations

import math

from areal_like.trajectory import NO_VERSION
from controller.coordinator import colocation, evaluation, rewriting
from controller.coordinator.effects import SendSwap, SendVersion
from controller.coordinator.events import (
    WorkerVersionFailed,
    WorkerVersionLoaded,
    WorkerVersionStaged,
)
from controller.coordinator.run_state import RunState
from controller.coordinator.worker import Worker
from controller.coordinator.worker_version import WorkerVersion


def version_staged(state: RunState, event: WorkerVersionStaged) -> None:
    """Handle that the worker has staged its version and waits for its turn."""
    worker = state.workers.get(event.worker)
    is_known = worker is not None and event.lineage in state.trainer.lineages
    if worker is None or not is_known or not _is_stage_expected(worker.weights, event.version):
        state.note("ignored", f"{event.worker} unexpectedly staged version {event.version} of lineage {event.lineage}")
        return
    worker.weights.stage()
    state.progress += 1


def _is_stage_expected(weights: WorkerVersion, version: int) -> bool:
    """Return whether a stage is expected. A repeated message is ignored: the worker would lose its turn, or get one for
    a version that it has.
    """
    return 0 <= version == weights.announced and weights.version < version and not weights.has_turn


def expire_loads(state: RunState) -> None:
    """Quarantine workers that miss the deadline, while the others continue. A worker returns when it has loaded a
    version.

    It may still be loading, so its leases are kept and no message is sent to it.
    """
    for worker in state.workers.values():
        if worker.is_present and state.now_s > worker.weights.load_due_s:
            doing = "load the version" if worker.weights.has_turn else "receive the version"
            reason = f"it did not {doing} within {state.settings.load_deadline_s:g} s"
            worker.weights.expire(reason, _retry_at_s(state))
            _quarantined(state, worker)


def grant_turn(state: RunState) -> None:
    """Grant the next turn when the previous worker has swapped or is quarantined. The worker with the oldest version is
    first.
    """
    waiting = []
    for worker in state.workers.values():
        if not worker.is_present:
            continue  # the turn of a lost worker must not block the others
        if worker.weights.has_turn:
            return
        if worker.weights.is_staged:
            waiting.append(worker)
    if waiting:
        worker = min(waiting, key=lambda one: (one.weights.version, one.name))
        weights = worker.weights
        weights.grant_turn(state.now_s + state.settings.load_deadline_s)
        state.emit(SendSwap(worker=worker.name, version=weights.announced, lineage=weights.announced_lineage))


def version_loaded(state: RunState, event: WorkerVersionLoaded) -> None:
    """Handle that the worker samples with this version; its quarantine ends."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage not in state.trainer.lineages or event.version > worker.weights.announced:
        # not from a lost worker (it may return and then has the version), but from an exited predecessor
        state.note("ignored", f"{event.worker} unexpectedly loaded version {event.version} of lineage {event.lineage}")
        return
    worker.weights.load(event.version)
    state.workers.changed(worker)
    state.progress += 1


def version_failed(state: RunState, event: WorkerVersionFailed) -> None:
    """Handle that the worker could not load a version and keeps its old one: it is quarantined, unless the failed
    version no longer matters.
    """
    worker = state.workers.get(event.worker)
    if worker is None or not worker.is_present:
        return
    if (event.version, event.lineage) != (worker.weights.announced, worker.weights.announced_lineage):
        state.note("ignored", f"{worker.name} could not load version {event.version}, which has been superseded")
        return
    if event.is_damaged and rewriting.damage_reported(state, worker):
        _fail(state, worker, event.reason or "it is damaged")
        return
    if worker.weights.pin is not None:
        evaluation.unpin(state, worker)
        worker.weights.mark_unloadable(event.version)
        if event.version < state.trainer.version:  # an old version may be deleted by now; only the newest matters
            state.note("eval_unpinned", f"{worker.name} cannot load version {event.version} for its evaluation")
            return
    _fail(state, worker, event.reason or "unknown reason")


def _fail(state: RunState, worker: Worker, reason: str) -> None:
    worker.weights.fail(reason, _retry_at_s(state))
    _quarantined(state, worker)


def _quarantined(state: RunState, worker: Worker) -> None:
    """Quarantine the worker: it gets no new leases until it has loaded a version. An evaluation is moved to another
    worker: on shared devices the trainer waits for it, and this worker may never recover.
    """
    state.workers.changed(worker)
    evaluation.unpin(state, worker)
    weights = worker.weights
    state.note("quarantined", f"{worker.name} cannot load version {weights.announced}: {weights.quarantine}")


def _retry_at_s(state: RunState) -> float:
    return state.now_s + state.settings.load_retry_s


def announce(state: RunState) -> None:
    """Announce to every worker the version it should load: the newest, or the one its evaluation is pinned to."""
    trainer = state.trainer
    if trainer.version == NO_VERSION or not colocation.is_engines_time(state):
        return
    for worker in state.workers.values():
        weights = worker.weights
        target, path, lineage = trainer.version, trainer.manifest_path, trainer.version_lineage
        if weights.pin is not None:
            target, path, lineage = weights.pin.version, weights.pin.manifest_path, weights.pin.lineage
        if target <= weights.announced and not weights.must_announce_again and not weights.quarantine:
            continue  # the most common case, handled here without a call for hundreds of workers
        if not worker.is_present or worker.is_draining or not colocation.may_announce(state, worker):
            continue
        if not path or rewriting.is_under_way(trainer, target):
            continue  # announced when the trainer has caught up, or has rewritten it
        if _is_announcement_due(state, weights, target):
            _announce(state, worker, target, path, lineage)


def _is_announcement_due(state: RunState, weights: WorkerVersion, target: int) -> bool:
    if target > weights.announced:
        return True
    if weights.must_announce_again and weights.version < target == weights.announced:
        return True
    if weights.load_due_s < math.inf:
        return False  # the result of this attempt is expected within the deadline
    has_tries = weights.load_attempts < state.settings.max_load_attempts
    return has_tries and bool(weights.quarantine) and state.now_s >= weights.retry_at_s


def _announce(state: RunState, worker: Worker, target: int, path: str, lineage: str) -> None:
    # Held if swaps take turns, except the first version of a worker, which has no running answers to interrupt, and the
    # version of an evaluation, which the other workers do not load.
    is_held = state.settings.swap == "rolling" and worker.is_usable and worker.weights.pin is None
    due_s = state.now_s + state.settings.load_deadline_s
    writing = rewriting.writing_of(state.trainer, target)
    worker.weights.announce(target, lineage, writing, due_s=due_s, retry_at_s=_retry_at_s(state))
    colocation.announced(state, worker)
    state.emit(
        SendVersion(
            worker=worker.name,
            version=target,
            lineage=lineage,
            manifest_path=path,
            is_held=is_held,
            incarnation=worker.incarnation,
        )
    )


def next_due_s(state: RunState) -> float:
    """Time of the next deadline of a worker or a rewrite, or of the next retry; infinite if none."""
    due_s = state.trainer.rewrite.due_s if state.trainer.rewrite is not None else math.inf
    for worker in state.workers.values():
        if worker.is_present:
            weights = worker.weights
            due_s = min(due_s, weights.load_due_s, weights.retry_at_s if weights.quarantine else math.inf)
    return due_s


def offer_again(state: RunState) -> None:
    """Announce the newest version again after it was published again or rewritten; workers that were still loading it
    start again.
    """
    for worker in state.workers.values():
        weights = worker.weights
        is_behind = weights.version < weights.announced == state.trainer.version
        if is_behind and weights.announced_lineage != state.trainer.version_lineage:
            weights.offer_again()
