"""Registration and loss of rollout workers: joining, losing (leases return, `exactly-once`), draining, measured speeds.

Versions are in version_rollout.py, leases in leasing.py.
"""

from __future__ import annotations

from collections.abc import Collection

from controller.coordinator import colocation, evaluation
from controller.coordinator.effects import SendCancel
from controller.coordinator.events import (
    WorkerDraining,
    WorkerEnded,
    WorkerJoined,
    WorkerLost,
    WorkerSpeed,
)
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.sample_intake import requeue
from controller.coordinator.worker import Worker


def join(state: RunState, event: WorkerJoined) -> None:
    """Handle the Hello of a worker: new, restarted, or back after silence."""
    worker = state.workers.setdefault(event.worker, Worker(event.worker))
    if worker.ended_incarnation == event.incarnation:
        # Sent before it ended and read after its loss for good: nobody would ever report the loss again.
        state.note("ignored", f"{worker.name} registered, but the worker's process has ended")
        return
    if worker.incarnation != event.incarnation:
        _take_leases_back(state, worker)
        worker.voided.clear()  # nothing to cancel: the process that had them has exited
        worker.weights.replace()
        worker.is_draining, worker.speed, worker.steps_per_s = False, 0.0, 0.0
        colocation.ended(state, worker)
    else:
        if worker.voided:  # it may still be working on samples that are now leased to others
            state.emit(SendCancel(worker=worker.name, lease_ids=tuple(sorted(worker.voided))))
            worker.voided.clear()
        worker.weights.reconnect()
        colocation.worker_is_back(state, worker)
    worker.incarnation, worker.capacity = event.incarnation, event.capacity
    worker.num_slots = state.settings.slots_of(event.capacity)
    worker.is_present, worker.is_gone, worker.is_external = True, False, event.is_external
    state.workers.changed(worker)
    state.progress += 1


def lose(state: RunState, event: WorkerLost) -> None:
    """Handle the loss of a worker that is silent or has exited: its leases return with the tokens it had reported."""
    worker = state.workers.setdefault(event.worker, Worker(event.worker))
    if worker.is_present and event.incarnation not in (None, worker.incarnation):
        return  # its successor has already joined
    num_held = len(worker.outstanding)
    _take_leases_back(state, worker)
    worker.is_present, worker.is_gone = False, event.is_permanent
    # A process that may be alive may have device memory; WorkerEnded reports when it does not.
    if not event.may_live and event.incarnation in (None, worker.incarnation):
        colocation.ended(state, worker)
    if event.is_permanent and not event.may_return:
        worker.ended_incarnation = worker.incarnation if event.incarnation is None else event.incarnation
    back = f"; {num_held} samples return to the queue" if num_held or not worker.is_draining else ""
    if worker.is_draining:
        state.note("worker_left", f"{worker.name} left ({event.reason}){back}")
    else:
        state.note("worker_lost", f"{worker.name} is lost ({event.reason}){back}")


def end(state: RunState, event: WorkerEnded) -> None:
    """Handle the exit of its process, reported by the supervisor: only now is its memory free."""
    worker = state.workers.get(event.worker)
    if worker is None:
        return
    if worker.is_present:  # its last message came after the report of its loss
        lose(
            state, WorkerLost(worker=event.worker, reason="the worker's process has ended", is_permanent=worker.is_gone)
        )
    colocation.ended(state, worker)


def drain(state: RunState, event: WorkerDraining) -> None:
    """Drain a worker: it gets no new leases, and its leases return as LeaseReturned.

    This also applies while the worker is lost: its messages may arrive again before it has exited.
    """
    worker = state.workers.get(event.worker)
    if worker is None or worker.is_draining or event.incarnation not in (None, worker.incarnation):
        return
    worker.is_draining = True
    worker.weights.drain()
    state.workers.changed(worker)
    evaluation.unpin(state, worker)
    if state.phase is not Phase.OVER:
        state.note(
            "draining",
            f"{worker.name} is draining; its {len(worker.outstanding)} running samples move to other workers",
        )


def can_spare(state: RunState, names: Collection[str]) -> bool:
    """Return whether some other worker that the run started is present, or will be restarted."""
    others = (worker for worker in state.workers.values() if worker.name not in names and not worker.is_external)
    return any(not worker.is_gone and not worker.is_draining and not worker.weights.quarantine for worker in others)


def take_speed(state: RunState, event: WorkerSpeed) -> None:
    """Handle a measured speed."""
    worker = state.workers.get(event.worker)
    if worker is not None and worker.is_present and event.tokens_per_s > 0:
        worker.speed, worker.steps_per_s = event.tokens_per_s, event.steps_per_s
        state.workers.changed(worker)


def _take_leases_back(state: RunState, worker: Worker) -> None:
    worker.is_present = False
    state.workers.changed(worker)
    worker.voided |= worker.outstanding
    evaluation.unpin(state, worker)
    for lease_id in sorted(worker.outstanding):
        lease = state.leases.get(lease_id)
        if lease is None:
            continue  # ended together with a group that was just dropped
        state.workers.unbook(worker, lease)
        lease.is_void = True
        state.routing.recalls.pop(lease_id, None)
        group = state.groups.table.live[lease.group_id]
        sample = group.samples[lease.sample_index]
        # The lease is kept as void: if the worker has finished the sample, its answer counts if it is the first.
        sample.lease_id = None
        sample.moving_to = sample.moved_from = ""
        requeue(state, group, sample, is_loss=True)
