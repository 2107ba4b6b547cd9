"""Shared devices of engines and trainer (`placement: colocated`): raises the events of the transition tables in
handover.py and carries out their actions.

The states are in handover.py. What is released and how is decided by engines and trainer. If devices are not shared,
every function here does nothing.
"""

from __future__ import annotations

import math

from controller.coordinator.effects import EndWorker, SendBatch, SendRelease
from controller.coordinator.events import WorkerReleased
from controller.coordinator.handover import (
    ENGINE,
    TURNS,
    Engine,
    EngineAction,
    EngineEvent,
    Turn,
    TurnAction,
    TurnEvent,
)
from controller.coordinator.run_parts import DeviceState
from controller.coordinator.run_state import RunState
from controller.coordinator.transitions import transition
from controller.coordinator.usable_workers import has_no_usable_workers
from controller.coordinator.worker import Worker

# ---------------------------------------------------------------- the turn


def may_hand_over(state: RunState, step: int) -> bool:
    """Return whether the batch of `step` may be sent to the trainer now. Always true if devices are not shared."""
    if not state.settings.is_colocated or _is_again(state.devices, step):
        return True
    is_busy = any(worker.outstanding for worker in state.workers.values() if worker.is_present)
    return state.devices.turn is Turn.ENGINES and not is_busy and not needs_engines_for_evaluation(state)


def needs_engines_for_evaluation(state: RunState) -> bool:
    """Return whether an evaluation is running, or can begin. While the trainer replays, the version of an evaluation
    may not be available until later.

    If no worker can load its version any more, it waits for the trainer's next version. Always False if devices are not
    shared.
    """
    if not state.settings.is_colocated:
        return False
    if state.trainer.manifest_path:
        return bool(state.evaluations.jobs) and not has_no_usable_workers(state)
    return any(w.is_present and _has_version_of_its_evaluation(w) for w in state.workers.values())


def _has_version_of_its_evaluation(worker: Worker) -> bool:
    pin = worker.weights.pin
    return pin is not None and worker.weights.version == pin.version


def _is_again(devices: DeviceState, step: int) -> bool:
    return step == devices.step and devices.turn in (Turn.RELEASING, Turn.TRAINER)


def hand_over(state: RunState, batch: SendBatch) -> None:
    """Send the batch to the trainer as soon as the engines have released their memory."""
    if not state.settings.is_colocated:
        state.emit(batch)
        return
    is_again = _is_again(state.devices, batch.step)
    state.devices.held_batch, state.devices.step = batch, batch.step
    _turn(state, TurnEvent.BATCH_AGAIN if is_again else TurnEvent.BATCH_READY)


def is_withheld(devices: DeviceState, step: int) -> bool:
    """Return whether the batch of this step is held back until the engines are empty; the trainer cannot have trained
    it.
    """
    return devices.held_batch is not None and step >= devices.held_batch.step


def published(state: RunState) -> None:
    """Handle a published version: the trainer has released its memory."""
    if state.settings.is_colocated:
        _turn(state, TurnEvent.PUBLISHED)


def trainer_died(state: RunState) -> None:
    """Handle the loss of the trainer: the batch that was prepared for it is discarded."""
    if state.settings.is_colocated:
        state.devices.step = 0
        _turn(state, TurnEvent.TRAINER_DIED)


def is_engines_time(state: RunState) -> bool:
    """Return whether versions may be announced and samples leased. Always true if devices are not shared."""
    return not state.settings.is_colocated or state.devices.turn is Turn.ENGINES


def advance(state: RunState) -> None:
    """Request memory, end workers that do not release it, and send the batch once all engines are empty."""
    if not state.settings.is_colocated:
        return
    for worker in state.workers.values():
        if state.devices.turn is Turn.RELEASING and worker.engine is Engine.HOLDING and worker.is_present:
            _engine(state, worker, EngineEvent.WANTED)
        elif worker.engine is Engine.RELEASING and state.now_s > worker.release_due_s:
            _engine(state, worker, EngineEvent.OVERDUE)
    if state.devices.turn is Turn.RELEASING and all(one.engine is Engine.EMPTY for one in state.workers.values()):
        _turn(state, TurnEvent.ENGINES_EMPTY)


def _turn(state: RunState, event: TurnEvent) -> None:
    devices = state.devices
    devices.turn, actions = transition(TURNS, devices.turn, event)
    for action in actions:
        match action:
            case TurnAction.HOLD_BATCH:
                pass  # set by hand_over
            case TurnAction.SEND_BATCH:
                assert devices.held_batch is not None, "the trainer received the devices without a batch"
                state.emit(devices.held_batch)
                devices.held_batch = None
            case TurnAction.DROP_BATCH:
                devices.held_batch = None


# ---------------------------------------------------------------- one engine


def may_announce(state: RunState, worker: Worker) -> bool:
    """Return whether a version may be announced to this worker now. Always true if devices are not shared."""
    return not state.settings.is_colocated or EngineEvent.ANNOUNCED in ENGINE[worker.engine]


def announced(state: RunState, worker: Worker) -> None:
    """Handle that a version is sent to the worker: from now on it has memory."""
    if state.settings.is_colocated:
        _engine(state, worker, EngineEvent.ANNOUNCED)


def released(state: RunState, event: WorkerReleased) -> None:
    """Handle that a worker has released its memory; only the answer to the last request counts."""
    worker = state.workers.get(event.worker)
    if worker is None or not state.settings.is_colocated:
        state.note("ignored", f"{event.worker} released memory without a request")
        return
    is_answer = _is_answer(worker, event)
    _engine(state, worker, EngineEvent.RELEASED if is_answer else EngineEvent.LATE_RELEASE)
    if is_answer:
        state.progress += 1
        state.note("released", f"{worker.name} released {event.num_bytes} bytes")


def _is_answer(worker: Worker, event: WorkerReleased) -> bool:
    """Return whether it answers the last request, and that request is still open."""
    return EngineEvent.RELEASED in ENGINE[worker.engine] and event.number == worker.release_number


def worker_is_back(state: RunState, worker: Worker) -> None:
    """Handle that the same process registers again."""
    if state.settings.is_colocated:
        _engine(state, worker, EngineEvent.BACK)


def ended(state: RunState, worker: Worker) -> None:
    """Handle that the process has exited, or a new process has taken its name: it has no memory."""
    if state.settings.is_colocated:
        _engine(state, worker, EngineEvent.ENDED)


def _engine(state: RunState, worker: Worker, event: EngineEvent) -> None:
    begin_s = _latest_begin_s(state, worker)
    worker.engine, actions = transition(ENGINE, worker.engine, event)
    for action in actions:
        match action:
            case EngineAction.REQUEST_RELEASE:
                _request_release(state, worker, begin_s)
            case EngineAction.FORGET:
                worker.release_due_s = math.inf
                worker.weights.forget()
                state.workers.changed(worker)
            case EngineAction.END_PROCESS:
                worker.release_due_s = math.inf
                limit_s = state.settings.idle_load_deadline_s
                reason = f"it did not release its memory within {limit_s:g} s, and the trainer waits for it"
                state.emit(EndWorker(worker=worker.name, reason=reason))
            case EngineAction.REPORT_LATE:
                state.note("ignored", f"{worker.name} replied to an earlier request to release its memory")


def _latest_begin_s(state: RunState, worker: Worker) -> float:
    """Latest time at which a release begins: the engine first finishes a load in progress, e.g. a slow first load.

    It runs no answers at this point, so the load does not wait for any to finish.
    """
    earlier_s = worker.release_due_s - state.settings.idle_load_deadline_s
    load_due_s = worker.weights.load_due_s - state.settings.drain_s
    return max(due_s for due_s in (state.now_s, load_due_s, earlier_s) if due_s < math.inf)


def _request_release(state: RunState, worker: Worker, begin_s: float) -> None:
    state.devices.num_release_requests += 1
    worker.release_number = state.devices.num_release_requests
    worker.release_due_s = begin_s + state.settings.idle_load_deadline_s
    number, incarnation = worker.release_number, worker.incarnation
    state.emit(SendRelease(worker=worker.name, number=number, incarnation=incarnation))


def waits(state: RunState) -> list[str]:
    """Waits of a handover, as sentences."""
    if not state.settings.is_colocated:
        return []
    if state.devices.turn is Turn.TRAINER:
        return ["the engines wait for the trainer: they share its devices"]
    if state.devices.turn is not Turn.RELEASING:
        return []
    names = ", ".join(
        worker.name if worker.is_present else f"{worker.name} (unreachable)"
        for worker in state.workers.values()
        if worker.engine is not Engine.EMPTY
    )
    return [f"the trainer waits for {names} to release memory"]
