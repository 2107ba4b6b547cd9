"""Versions between their announcement and their use: whose turn it is to swap, and who is late.

Owns: staged versions, turns (`swap: rolling`), the deadline of a load. Refuses: announcing, and what loading or failing
means (worker_lifecycle.py). A turn is passed on when its worker has swapped, failed, died or missed the deadline.
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


def version_staged(state: RunState, event: WorkerVersionStaged) -> None:
    """The worker waits for its turn from now on; that it comes is not its business."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage not in state.lineages or event.version != worker.announced:
        state.note("ignored", f"{event.worker} staged version {event.version} of lineage {event.lineage}")
        return
    worker.staged, worker.has_turn, worker.load_due_s = event.version, False, math.inf
    state.progress += 1


def expire_loads(state: RunState) -> None:
    """A worker that misses the deadline is quarantined and the others go on; when it has loaded after all it is back.

    It may be busy with it still, so nothing is taken from it and nothing is said to it.
    """
    for worker in state.workers.values():
        if worker.is_present and state.now_s > worker.load_due_s:
            doing = "swap it in" if worker.has_turn else "get it"
            worker.end_load()
            quarantine(state, worker, f"it did not {doing} within {state.settings.load_deadline_s:g} s")


def give(state: RunState) -> None:
    """The next worker swaps when the one before has, or is given up. Who is furthest behind comes first."""
    waiting = []
    for worker in state.workers.values():
        if worker.is_present and worker.has_turn:
            return
        if worker.is_present and worker.staged == worker.announced != NO_VERSION and not worker.has_turn:
            waiting.append(worker)
    if waiting:
        worker = min(waiting, key=lambda one: (one.version, one.name))
        worker.has_turn, worker.load_due_s = True, state.now_s + state.settings.load_deadline_s
        state.emit(SendSwap(worker=worker.name, version=worker.staged, lineage=worker.announced_lineage))


def version_loaded(state: RunState, event: WorkerVersionLoaded) -> None:
    """The worker samples with this version from now on; a quarantine ends."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage not in state.lineages or event.version > worker.announced:
        # not from a lost worker (it may come back and has the version then), but from a dead predecessor
        state.note("ignored", f"{event.worker} loaded version {event.version} of lineage {event.lineage}")
        return
    worker.version = max(worker.version, event.version)
    if worker.version >= worker.announced:
        worker.end_load()
    worker.quarantine, worker.load_attempts, worker.unloadable = "", 0, NO_VERSION
    state.progress += 1


def version_failed(state: RunState, event: WorkerVersionFailed) -> None:
    """The worker keeps its old version: quarantined, unless what failed no longer matters."""
    worker = state.workers.get(event.worker)
    if worker is None or not worker.is_present:
        return
    if (event.version, event.lineage) != (worker.announced, worker.announced_lineage):
        state.note("ignored", f"{worker.name} could not load version {event.version}, superseded meanwhile")
        return
    worker.end_load()
    if event.is_damaged and rewriting.damage_reported(state, worker):
        quarantine(state, worker, event.reason or "it is damaged")
        return
    if worker.pin is not None:
        evaluation.unpin(state, worker)
        worker.unloadable = max(worker.unloadable, event.version)
        if event.version < state.version:  # an old version may be deleted by now; the newest is what counts
            state.note("eval_unpinned", f"{worker.name} cannot load version {event.version} for its evaluation")
            return
    quarantine(state, worker, event.reason or "unknown reason")


def quarantine(state: RunState, worker: Worker, reason: str) -> None:
    """It gets no new leases until it has loaded the version it was notified of."""
    worker.quarantine = reason
    worker.retry_at_s = state.now_s + state.settings.load_retry_s
    state.note("quarantined", f"{worker.name} cannot load version {worker.announced}: {reason}")


def announce(state: RunState) -> None:
    """Tell every worker the version it should load: the newest, or the one its evaluation is pinned to."""
    if state.version == NO_VERSION or not colocation.is_engines_time(state):
        return
    for worker in state.workers.values():
        if not worker.is_present or worker.is_draining or not colocation.may_announce(state, worker):
            continue
        target, path, lineage = state.version, state.manifest_path, state.version_lineage
        if worker.pin is not None:
            target, path, lineage = worker.pin.version, worker.pin.manifest_path, worker.pin.lineage
        if not path or rewriting.is_under_way(state, target):
            continue  # it comes when the trainer has caught up, or has written it again
        is_due = target > worker.announced or (
            worker.must_announce_again and worker.version < target == worker.announced
        )
        is_loading = worker.load_due_s < math.inf  # what it says of this attempt is awaited, within the deadline
        if not is_due and not is_loading and worker.load_attempts < state.settings.max_load_attempts:
            is_due = bool(worker.quarantine) and state.now_s >= worker.retry_at_s
        if is_due:
            worker.load_attempts = worker.load_attempts + 1 if target == worker.announced else 1
            worker.announced, worker.announced_lineage = target, lineage
            worker.announced_writing = rewriting.writing_of(state, target)
            worker.must_announce_again = False
            colocation.announced(state, worker)
            worker.retry_at_s = state.now_s + state.settings.load_retry_s
            worker.end_load()
            worker.load_due_s = state.now_s + state.settings.load_deadline_s
            is_held = state.settings.swap == "rolling" and worker.is_usable and worker.pin is None
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
    """When the next worker, or a rewrite, is late, or one is to be tried again; infinite where none."""
    due_s = state.rewrite.due_s if state.rewrite is not None else math.inf
    for worker in state.workers.values():
        if worker.is_present:
            due_s = min(due_s, worker.load_due_s, worker.retry_at_s if worker.quarantine else math.inf)
    return due_s


def offer_again(state: RunState) -> None:
    """The newest version is there, perhaps from another life of the trainer: who was still getting it starts again."""
    for worker in state.workers.values():
        is_behind = worker.version < worker.announced == state.version
        if is_behind and worker.announced_lineage != state.version_lineage:
            worker.must_announce_again, worker.load_attempts = True, 0
