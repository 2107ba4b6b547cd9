"""Whose devices they are, where engines and trainer share them (`placement: colocated`).

Owns: the order of the handover. Refuses: what is released and how (the engines' and the trainer's), which batch it is
(coordinator.py), dead processes (supervision.py).

    ENGINES   workers load the newest version, which makes them take their memory, and generate
       |      a batch is ready, nothing is leased, no evaluation runs
    HANDOVER  nothing is announced or leased; each worker that has memory is told to release it
       |      each has said so, or is gone; who does neither until the deadline is ended
    TRAINER   the batch is sent; the trainer takes its memory, trains, copies the version, releases its memory
       |      the version is published
    ENGINES

A worker that starts anew has no memory until a version is announced to it, so one that comes in the trainer's time
waits. One that was out of reach may have missed what it was told, and is told again. A trainer that is lost ends the
run or comes back with a published version: both end its time.
"""

from __future__ import annotations

import math

from areal_like.trajectory import NO_VERSION
from controller import protocol as p
from controller.state import Holder, RunState, Worker


def may_hand_over(state: RunState) -> bool:
    """A batch may go to the trainer: nothing runs that needs an engine. Always so where devices are not shared."""
    if not state.settings.is_colocated:
        return True
    return not state.eval_jobs and not any(w.outstanding for w in state.workers.values() if w.is_present)


def hand_over(state: RunState, batch: p.SendBatch) -> None:
    """The batch goes to the trainer as soon as the engines have released their memory."""
    if not state.settings.is_colocated:
        state.emit(batch)
        return
    state.held_batch, state.holder = batch, Holder.HANDOVER


def released(state: RunState, event: p.WorkerReleased) -> None:
    """A worker has given its memory back; it has no version until it loads one."""
    worker = state.workers.get(event.worker)
    if worker is None or worker.release_due_s is None:
        state.note("ignored", f"{event.worker} released memory that it was not asked for")
        return
    forget_memory(worker)
    state.progress += 1
    state.note("released", f"{worker.name} released {event.num_bytes} bytes")


def forget_memory(worker: Worker) -> None:
    """It holds none: it said so, or its process is another one by now."""
    worker.has_memory, worker.release_due_s = False, None
    worker.version = worker.announced = NO_VERSION
    worker.end_load()


def advance(state: RunState) -> None:
    """Ask for memory, end workers that keep theirs, and send the batch once nobody has any."""
    if state.holder is not Holder.HANDOVER:
        return
    limit_s = state.settings.load_deadline_s
    holders = [worker for worker in state.workers.values() if worker.has_memory]
    for worker in holders:
        if worker.release_due_s is None and worker.is_present:
            worker.release_due_s = state.now_s + limit_s
            state.emit(p.SendRelease(worker=worker.name))
        elif worker.release_due_s is not None and state.now_s > worker.release_due_s:
            worker.release_due_s = math.inf  # said once; its end is the supervisor's to see
            reason = f"it did not release its memory within {limit_s:g} s, and the trainer waits for it"
            state.emit(p.EndWorker(worker=worker.name, reason=reason))
    if not holders and state.held_batch is not None:
        batch, state.held_batch, state.holder = state.held_batch, None, Holder.TRAINER
        state.emit(batch)


def published(state: RunState) -> None:
    """A version is out: the trainer has released its memory."""
    if state.settings.is_colocated and state.held_batch is None:
        state.holder = Holder.ENGINES


def trainer_died(state: RunState) -> None:
    """It starts again: what was to be sent to it is void; a turn that it had lasts until it has published again."""
    state.held_batch = None
    if state.holder is Holder.HANDOVER:
        state.holder = Holder.ENGINES


def is_engines_time(state: RunState) -> bool:
    """Versions may be announced and samples leased. Always so where devices are not shared."""
    return state.holder is Holder.ENGINES


def waits(state: RunState) -> list[str]:
    """Who waits for whom at a handover."""
    if state.holder is Holder.TRAINER:
        return ["the engines wait for the trainer: they share its devices"]
    if state.holder is not Holder.HANDOVER:
        return []
    names = ", ".join(worker.name for worker in state.workers.values() if worker.has_memory)
    return [f"the trainer waits for {names} to release memory"]
