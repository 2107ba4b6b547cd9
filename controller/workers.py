"""Rollout workers as they come, go, and load versions.

Owns: joining, losing (leases return, law 4), draining, announcing versions, quarantine (law 9), measured speeds.
Refuses: choosing what to lease.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from areal_like.trajectory import NO_VERSION
from controller import alternation, eval_pins
from controller import protocol as p
from controller.reports import requeue
from controller.state import Phase, RunState, Worker


def join(state: RunState, event: p.WorkerJoined) -> None:
    """A worker says Hello: new, restarted, or back after silence."""
    worker = state.workers.setdefault(event.worker, Worker(event.worker))
    if worker.incarnation != event.incarnation:
        _take_leases_back(state, worker)
        worker.voided.clear()
        worker.version = worker.announced = NO_VERSION
        worker.quarantine, worker.load_attempts, worker.unloadable = "", 0, NO_VERSION
        worker.end_load()
        worker.is_draining, worker.speed, worker.steps_per_s = False, 0.0, 0.0
        alternation.forget_memory(worker)
    else:
        if worker.voided:  # it may still be busy with what is leased to others by now
            state.emit(p.SendCancel(worker=worker.name, lease_ids=tuple(sorted(worker.voided))))
            worker.voided.clear()
        worker.is_retold = True
        worker.release_due_s = None
    worker.incarnation, worker.capacity = event.incarnation, event.capacity
    worker.num_slots = state.settings.slots_of(event.capacity)
    worker.is_present, worker.is_gone = True, False
    state.progress += 1


def lose(state: RunState, event: p.WorkerLost) -> None:
    """A worker is silent or dead: its leases return with the tokens it had reported."""
    worker = state.workers.setdefault(event.worker, Worker(event.worker))
    if worker.is_present and event.incarnation not in (None, worker.incarnation):
        return  # its successor has joined already
    num_held = len(worker.outstanding)
    _take_leases_back(state, worker)
    worker.is_present, worker.is_gone = False, event.is_permanent
    if state.settings.is_colocated and not event.may_live:
        alternation.forget_memory(worker)
    back = f"; {num_held} samples go back to the queue" if num_held or not worker.is_draining else ""
    kind, verb = ("worker_left", "left") if worker.is_draining else ("worker_lost", "is lost")
    state.note(kind, f"{worker.name} {verb} ({event.reason}){back}")


def drain(state: RunState, event: p.WorkerDraining) -> None:
    """A worker is about to leave: it gets nothing new, and what it holds comes back as LeaseReturned.

    It counts also while the worker is lost: the same process may be heard again before it has left.
    """
    worker = state.workers.get(event.worker)
    if worker is None or worker.is_draining or event.incarnation not in (None, worker.incarnation):
        return
    worker.is_draining = True
    worker.end_load()
    eval_pins.unpin(state, worker)
    if state.phase is not Phase.OVER:
        state.note("draining", f"{worker.name} leaves; its {len(worker.outstanding)} running samples move on")


def can_spare(state: RunState, names: Collection[str]) -> bool:
    """Some worker besides these is there, or will be started again."""
    others = (worker for worker in state.workers.values() if worker.name not in names)
    return any(not worker.is_gone and not worker.is_draining and not worker.quarantine for worker in others)


def take_speed(state: RunState, event: p.WorkerSpeed) -> None:
    """A speed was measured."""
    worker = state.workers.get(event.worker)
    if worker is not None and worker.is_present and event.tokens_per_s > 0:
        worker.speed, worker.steps_per_s = event.tokens_per_s, event.steps_per_s


def _take_leases_back(state: RunState, worker: Worker) -> None:
    worker.is_present = False
    worker.voided |= worker.outstanding
    eval_pins.unpin(state, worker)
    for lease_id in sorted(worker.outstanding):
        lease = state.leases.get(lease_id)
        if lease is None:
            continue  # ended together with a group given up just now
        worker.let_go(lease)
        lease.is_void = True
        state.recalls.pop(lease_id, None)
        group = state.table.live[lease.group_id]
        sample = group.samples[lease.sample_index]
        sample.lease_id = None
        sample.moving_to = sample.moved_from = ""
        requeue(state, group, sample, is_loss=True)


def version_loaded(state: RunState, event: p.WorkerVersionLoaded) -> None:
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


def version_failed(state: RunState, event: p.WorkerVersionFailed) -> None:
    """The worker keeps its old version: quarantined, unless what failed no longer matters."""
    worker = state.workers.get(event.worker)
    if worker is None or not worker.is_present:
        return
    if event.version != worker.announced:
        state.note("ignored", f"{worker.name} could not load version {event.version}, superseded meanwhile")
        return
    worker.end_load()
    if worker.pin is not None:
        eval_pins.unpin(state, worker)
        worker.unloadable = max(worker.unloadable, event.version)
        if event.version < state.version:  # an old version may be deleted by now; the newest is what counts
            state.note("eval_unpinned", f"{worker.name} cannot load version {event.version} for its evaluation")
            return
    quarantine(state, worker, event.reason or "unknown reason")


def quarantine(state: RunState, worker: Worker, reason: str) -> None:
    """It gets no new leases until it has loaded the version it was told of."""
    worker.quarantine = reason
    worker.retry_at_s = state.now_s + state.settings.load_retry_s
    state.note("quarantined", f"{worker.name} cannot load version {worker.announced}: {reason}")


def announce(state: RunState) -> None:
    """Tell every worker the version it should load: the newest, or the one its evaluation is pinned to."""
    if state.version == NO_VERSION or not alternation.is_engines_time(state):
        return
    for worker in state.workers.values():
        if not worker.is_present or worker.is_draining:
            continue
        target, path, lineage = state.version, state.manifest_path, state.version_lineage
        if worker.pin is not None:
            target, path, lineage = worker.pin.version, worker.pin.manifest_path, worker.pin.lineage
        if not path:
            continue  # it comes again when the trainer has caught up
        is_due = target > worker.announced or (worker.is_retold and worker.version < target == worker.announced)
        if not is_due and worker.quarantine and worker.load_attempts < state.settings.max_load_attempts:
            is_due = state.now_s >= worker.retry_at_s
        if is_due:
            worker.load_attempts = worker.load_attempts + 1 if target == worker.announced else 1
            worker.announced, worker.announced_lineage = target, lineage
            worker.is_retold, worker.has_memory = False, True
            worker.retry_at_s = state.now_s + state.settings.load_retry_s
            worker.end_load()
            worker.load_due_s = state.now_s + state.settings.load_deadline_s
            is_held = state.settings.swap == "rolling" and worker.is_usable and worker.pin is None
            state.emit(
                p.SendVersion(worker=worker.name, version=target, lineage=lineage, manifest_path=path, is_held=is_held)
            )


def next_due_s(state: RunState) -> float:
    """When the next worker is late with a version, or is to be tried again; infinite where none."""
    return min(
        (min(w.load_due_s, w.retry_at_s if w.quarantine else math.inf) for w in state.workers.values() if w.is_present),
        default=math.inf,
    )


def offer_again(state: RunState) -> None:
    """The newest version is there, perhaps from another life of the trainer: who was still getting it starts anew."""
    for worker in state.workers.values():
        is_behind = worker.version < worker.announced == state.version
        if is_behind and worker.announced_lineage != state.version_lineage:
            worker.is_retold, worker.load_attempts = True, 0


def is_stuck(state: RunState, worker: Worker) -> bool:
    """This worker will do nothing more unless a new version comes."""
    if not worker.is_present:
        return worker.is_gone
    has_tries = worker.load_attempts < state.settings.max_load_attempts or state.now_s < worker.retry_at_s
    return bool(worker.quarantine) and not has_tries and not worker.outstanding
