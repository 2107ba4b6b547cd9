"""Rollout workers as they come, go, and load versions.

Owns: joining, losing (leases return, law 4), announcing versions, quarantine (law 9). Refuses: choosing what to lease.
"""

from __future__ import annotations

import math

from areal_like.trajectory import NO_VERSION
from controller import eval_pins
from controller import protocol as p
from controller.reports import requeue
from controller.state import RunState, Worker


def join(state: RunState, event: p.WorkerJoined) -> None:
    """A worker says Hello: new, restarted, or back after silence."""
    worker = state.workers.setdefault(event.worker, Worker(event.worker))
    if worker.incarnation != event.incarnation:
        _take_leases_back(state, worker)
        worker.voided.clear()
        worker.version = worker.announced = NO_VERSION
        worker.quarantine, worker.load_attempts, worker.unloadable = "", 0, NO_VERSION
        _end_load(worker)
    else:
        if worker.voided:  # it may still be busy with what is leased to others by now
            state.emit(p.SendCancel(worker=worker.name, lease_ids=tuple(sorted(worker.voided))))
            worker.voided.clear()
        worker.is_retold = True
    worker.incarnation, worker.capacity = event.incarnation, event.capacity
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
    state.note("worker_lost", f"{worker.name} is lost ({event.reason}); {num_held} samples go back to the queue")


def _take_leases_back(state: RunState, worker: Worker) -> None:
    worker.is_present = False
    worker.voided |= worker.outstanding
    eval_pins.unpin(state, worker)
    for lease_id in sorted(worker.outstanding):
        lease = state.leases.get(lease_id)
        if lease is None:
            continue  # ended together with a group given up just now
        worker.outstanding.discard(lease_id)
        lease.is_void = True
        group = state.table.live[lease.group_id]
        sample = group.samples[lease.sample_index]
        sample.lease_id = None
        requeue(state, group, sample, is_loss=True)


def version_staged(state: RunState, event: p.WorkerVersionStaged) -> None:
    """The worker waits for its turn from now on; that it comes is not its business."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage != state.lineage or event.version != worker.announced:
        state.note("ignored", f"{event.worker} staged version {event.version} of lineage {event.lineage}")
        return
    worker.staged, worker.has_turn, worker.load_due_s = event.version, False, math.inf
    state.progress += 1


def version_loaded(state: RunState, event: p.WorkerVersionLoaded) -> None:
    """The worker samples with this version from now on; a quarantine ends."""
    worker = state.workers.get(event.worker)
    if worker is None or event.lineage != state.lineage or event.version > worker.announced:
        # not from a lost worker (it may come back and has the version then), but from a dead predecessor
        state.note("ignored", f"{event.worker} loaded version {event.version} of lineage {event.lineage}")
        return
    worker.version = max(worker.version, event.version)
    if worker.version >= worker.announced:
        _end_load(worker)
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
    _end_load(worker)
    if worker.pin is not None:
        eval_pins.unpin(state, worker)
        worker.unloadable = max(worker.unloadable, event.version)
        if event.version < state.version:  # an old version may be deleted by now; the newest is what counts
            state.note("eval_unpinned", f"{worker.name} cannot load version {event.version} for its evaluation")
            return
    _quarantine(state, worker, event.reason or "unknown reason")


def _quarantine(state: RunState, worker: Worker, reason: str) -> None:
    worker.quarantine = reason
    worker.retry_at_s = state.now_s + state.settings.load_retry_s
    state.note("quarantined", f"{worker.name} cannot load version {worker.announced}: {reason}")


def _end_load(worker: Worker) -> None:
    """Nothing is under way to this worker."""
    worker.staged, worker.has_turn, worker.load_due_s = NO_VERSION, False, math.inf


def judge_late(state: RunState) -> None:
    """A worker that misses the deadline is quarantined and the others go on; when it has loaded after all it is back.

    It may be busy with it still, so nothing is taken from it and nothing is said to it.
    """
    for worker in state.workers.values():
        if worker.is_present and state.now_s > worker.load_due_s:
            doing = "swap it in" if worker.has_turn else "get it"
            _end_load(worker)
            _quarantine(state, worker, f"it did not {doing} within {state.settings.load_deadline_s:g} s")


def give_turn(state: RunState) -> None:
    """Rolling: the next worker swaps when the one before has, or is given up. Who is furthest behind comes first."""
    waiting = []
    for worker in state.workers.values():
        if worker.is_present and worker.has_turn and not worker.quarantine:
            return
        if worker.is_present and worker.staged == worker.announced != NO_VERSION and not worker.has_turn:
            waiting.append(worker)
    if waiting:
        worker = min(waiting, key=lambda one: (one.version, one.name))
        worker.has_turn, worker.load_due_s = True, state.now_s + state.settings.load_deadline_s
        state.emit(p.SendSwap(worker=worker.name, version=worker.staged, lineage=state.lineage))


def announce(state: RunState) -> None:
    """Tell every worker the version it should load: the newest, or the one its evaluation is pinned to."""
    if state.version == NO_VERSION:
        return
    for worker in state.workers.values():
        if not worker.is_present:
            continue
        target, path = state.version, state.manifest_path
        if worker.pin is not None:
            target, path = worker.pin.version, worker.pin.manifest_path
        is_due = target > worker.announced or (worker.is_retold and worker.version < target == worker.announced)
        if not is_due and worker.quarantine and worker.load_attempts < state.settings.max_load_attempts:
            is_due = state.now_s >= worker.retry_at_s
        if is_due:
            worker.load_attempts = worker.load_attempts + 1 if target == worker.announced else 1
            worker.announced, worker.is_retold = target, False
            worker.retry_at_s = state.now_s + state.settings.load_retry_s
            _end_load(worker)
            worker.load_due_s = state.now_s + state.settings.load_deadline_s
            is_held = state.settings.swap == "rolling" and worker.is_usable and worker.pin is None
            state.emit(
                p.SendVersion(
                    worker=worker.name, version=target, lineage=state.lineage, manifest_path=path, is_held=is_held
                )
            )


def is_stuck(state: RunState, worker: Worker) -> bool:
    """This worker will do nothing more unless a new version comes."""
    if not worker.is_present:
        return worker.is_gone
    has_tries = worker.load_attempts < state.settings.max_load_attempts or state.now_s < worker.retry_at_s
    return bool(worker.quarantine) and not has_tries and not worker.outstanding
