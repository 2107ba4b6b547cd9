"""Single decisions of a handover between engines and trainer, each on a state made for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from made_workers import made_weights, made_worker

from controller.coordinator import colocation
from controller.coordinator.effects import EndWorker, Note, SendBatch, SendRelease
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.events import WorkerReleased
from controller.coordinator.handover import Engine, Turn
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Worker


def shared(turn: Turn = Turn.ENGINES, **settings: Any) -> RunState:
    chosen = {"groups_per_step": 1, "group_size": 1, "num_steps": 3, "is_colocated": True, "load_deadline_s": 10.0}
    state = RunState(CoordinatorSettings(**{**chosen, **settings}))  # type: ignore[arg-type]
    state.devices.turn, state.trainer.manifest_path = turn, "v0"
    return state


def add(state: RunState, name: str = "w0", *, is_present: bool = True, **facts: Any) -> Worker:
    worker = made_worker(name, **facts)
    worker.is_present = is_present
    state.workers[name] = worker
    return worker


def evaluation_at(version: int) -> EvalJob:
    return EvalJob(version, version, f"v{version}", "l0", "periodic", 1, [0])


def batch(step: int) -> SendBatch:
    return SendBatch(step=step, lineage="l0", groups=(), is_replay=False)


@pytest.mark.parametrize(("turn", "may"), [(Turn.SETUP, False), (Turn.ENGINES, True), (Turn.TRAINER, False)])
def test_a_batch_is_handed_over_only_in_the_engines_time(turn: Turn, may: bool) -> None:
    assert colocation.may_hand_over(shared(turn), 1) is may


@pytest.mark.parametrize("is_present", [True, False])
def test_a_batch_waits_for_workers_that_are_present_and_hold_leases(is_present: bool) -> None:
    state = shared()
    add(state, is_present=is_present, outstanding={1})
    assert colocation.may_hand_over(state, 1) is not is_present


def test_the_batch_of_the_running_handover_goes_out_again_whatever_runs() -> None:
    for turn in (Turn.RELEASING, Turn.TRAINER):
        state = shared(turn)
        state.devices.step = 2
        add(state, outstanding={1})
        assert colocation.may_hand_over(state, 2)
        assert not colocation.may_hand_over(state, 1)
    state = shared(Turn.SETUP)
    state.devices.step = 2
    assert not colocation.may_hand_over(state, 2)


def test_a_batch_waits_for_an_evaluation_that_has_no_leases_yet() -> None:
    state = shared()
    state.evaluations.jobs.append(evaluation_at(0))
    assert not colocation.may_hand_over(state, 1)
    state.evaluations.jobs.clear()
    assert colocation.may_hand_over(state, 1)


@pytest.mark.parametrize(("is_present", "version", "may"), [(True, 1, False), (False, 1, True), (True, 0, True)])
def test_while_the_trainer_replays_only_an_evaluation_whose_version_is_loaded_is_waited_for(
    is_present: bool, version: int, may: bool
) -> None:
    state = shared()
    state.trainer.manifest_path = ""
    job = evaluation_at(1)
    state.evaluations.jobs.append(job)
    add(state, "free", version=1)
    add(state, is_present=is_present, version=version, pin=job)
    assert colocation.may_hand_over(state, 1) is may


@pytest.mark.parametrize(("step", "is_withheld"), [(1, False), (2, True), (3, True)])
def test_steps_from_the_held_batch_on_are_withheld(step: int, is_withheld: bool) -> None:
    state = shared()
    assert not colocation.is_withheld(state.devices, step)
    state.devices.held_batch = batch(2)
    assert colocation.is_withheld(state.devices, step) is is_withheld


def test_a_batch_goes_straight_to_the_trainer_where_devices_are_separate() -> None:
    state = shared(is_colocated=False)
    colocation.hand_over(state, batch(1))
    assert [type(effect) for effect in state.take_effects()] == [SendBatch]
    assert state.devices.held_batch is None
    assert colocation.is_engines_time(state)
    assert colocation.may_announce(state, add(state))


def released(state: RunState, worker: str, number: int) -> list[str]:
    colocation.released(state, WorkerReleased(worker=worker, number=number, num_bytes=7))
    return [effect.kind for effect in state.take_effects() if isinstance(effect, Note)]


def test_only_the_answer_to_the_last_request_counts_as_a_release() -> None:
    state = shared(Turn.RELEASING)
    worker = add(state, engine=Engine.HOLDING)
    state.devices.num_release_requests = 4
    colocation.advance(state)
    request = next(effect for effect in state.take_effects() if isinstance(effect, SendRelease))
    assert (request.worker, request.number) == ("w0", 5)
    before = state.progress
    assert released(state, "w0", 4) == ["ignored"]
    assert worker.engine is Engine.RELEASING
    assert state.progress == before
    assert released(state, "w0", 5) == ["released"]
    assert worker.engine is Engine.EMPTY
    assert state.progress > before
    assert released(state, "w0", 5) == ["ignored"]


def test_a_release_by_a_worker_nobody_knows_or_on_separate_devices_is_only_noted() -> None:
    assert released(shared(), "nobody", 1) == ["ignored"]
    state = shared(is_colocated=False)
    add(state, engine=Engine.EMPTY)
    assert released(state, "w0", 0) == ["ignored"]


def test_a_released_worker_has_no_version_and_no_load_under_way() -> None:
    state = shared(Turn.RELEASING)
    worker = add(state, engine=Engine.HOLDING, version=3, announced=4, load_due_s=5.0)
    colocation.advance(state)
    released(state, "w0", 1)
    assert (worker.weights.version, worker.weights.announced) == (-1, -1)
    assert worker.weights.load_due_s == math.inf


@pytest.mark.parametrize(("load_due_s", "due_s"), [(math.inf, 13.0), (2.0, 13.0), (8.0, 18.0)])
def test_the_deadline_of_a_release_begins_when_the_load_under_way_must_have_ended(
    load_due_s: float, due_s: float
) -> None:
    state = shared(Turn.RELEASING)
    state.now_s = 3.0
    worker = add(state, engine=Engine.HOLDING, load_due_s=load_due_s)
    colocation.advance(state)
    assert worker.release_due_s == due_s


def test_the_deadline_of_a_release_has_no_time_for_answers_that_no_worker_runs() -> None:
    state = shared(Turn.RELEASING, load_deadline_s=1810.0, drain_s=1800.0)
    worker = add(state, engine=Engine.HOLDING, load_due_s=1808.0)
    colocation.advance(state)
    assert worker.release_due_s == 18.0


def test_a_batch_does_not_wait_for_an_evaluation_that_no_worker_can_carry_out() -> None:
    state = shared(max_load_attempts=1)
    state.evaluations.jobs.append(evaluation_at(0))
    worker = add(state, version=0)
    assert not colocation.may_hand_over(state, 1)
    worker.weights = made_weights(version=0, quarantine="bad checksum", load_attempts=1)
    assert colocation.may_hand_over(state, 1)


@pytest.mark.parametrize(("now_s", "ends"), [(10.0, False), (10.5, True)])
def test_a_worker_that_keeps_its_memory_is_ended_after_its_deadline_not_at_it(now_s: float, ends: bool) -> None:
    state = shared(Turn.RELEASING)
    add(state, engine=Engine.HOLDING)
    colocation.advance(state)
    state.now_s = now_s
    colocation.advance(state)
    assert any(isinstance(effect, EndWorker) for effect in state.take_effects()) is ends


def test_a_worker_out_of_reach_is_not_asked_and_keeps_the_batch_back() -> None:
    state = shared(Turn.RELEASING)
    state.devices.held_batch = batch(1)
    add(state, "gone", is_present=False, engine=Engine.HOLDING)
    add(state, "empty", engine=Engine.EMPTY)
    colocation.advance(state)
    assert not state.take_effects()
    assert colocation.waits(state) == ["the trainer waits for gone (unreachable) to release memory"]


def test_who_waits_at_a_handover_is_named() -> None:
    assert colocation.waits(shared(Turn.TRAINER)) == ["the engines wait for the trainer: they share its devices"]
    assert colocation.waits(shared(Turn.ENGINES)) == []
    assert colocation.waits(shared(Turn.RELEASING, is_colocated=False)) == []


def test_a_dead_trainer_has_no_handover_to_repeat() -> None:
    state = shared(Turn.TRAINER)
    state.devices.step, state.devices.held_batch = 2, None
    colocation.trainer_died(state)
    assert state.devices.step == 0
    assert not colocation.may_hand_over(state, 2)
