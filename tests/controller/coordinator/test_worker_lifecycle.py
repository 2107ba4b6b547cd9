"""Claims about workers that join, are lost, drain and are measured."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, has, leased, only
from made_workers import made_worker

from controller.coordinator import worker_lifecycle
from controller.coordinator.effects import Note, SendCancel, SendVersion
from controller.coordinator.events import WorkerDraining, WorkerEnded, WorkerLost, WorkerSpeed
from controller.coordinator.run_state import RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.usable_workers import is_stuck
from controller.coordinator.worker import Worker


def running(**changes: Any) -> Desk:
    desk = Desk(**{"groups_per_step": 2, "max_staleness": 0, **changes})
    desk.start()
    return desk


def test_a_lost_worker_is_named_with_what_returns_to_the_queue() -> None:
    desk = running()
    assert only(desk.lose("w0"), Note).text == "w0 is lost (killed); 2 samples return to the queue"


def test_a_worker_that_comes_back_is_asked_to_stop_what_it_held_once_and_is_sent_its_version_again() -> None:
    desk = running()
    held = sorted(desk.held)
    desk.lose("w0")
    assert only(desk.join("w0"), SendCancel).lease_ids == tuple(held)
    desk.lose("w0")
    again = [one for one in desk.join("w0") if isinstance(one, SendCancel)]
    assert not set(held) & {lease_id for one in again for lease_id in one.lease_ids}


def test_a_new_process_is_sent_the_version_and_no_cancellation() -> None:
    desk = running()
    desk.lose("w0")
    effects = desk.join("w0", incarnation="b")
    assert only(effects, SendVersion).incarnation == "b"
    assert not has(effects, SendCancel)


def test_a_hello_read_after_its_process_is_gone_for_good_brings_no_worker_back() -> None:
    desk = running(num_workers=2)
    desk.join("w1")
    desk.lose("w0", is_permanent=True)
    effects = desk.join("w0")
    assert only(effects, Note).text == "w0 registered, but the worker's process has ended"
    assert not desk.coordinator._state.workers["w0"].is_present
    assert not has(desk.load("w0", 0), SendVersion)
    assert desk.held == {}, "a sample leased to it would wait until its group's timeout"
    assert only(desk.join("w0", incarnation="b"), SendVersion).incarnation == "b"


def test_the_first_hello_of_a_process_is_ignored_where_its_loss_for_good_was_read_before() -> None:
    desk = running(num_workers=2)
    desk.join("w1")
    desk.lose("w0")
    desk.do(WorkerLost(worker="w0", reason="killed", is_permanent=True, incarnation="b"))
    assert not has(desk.join("w0", incarnation="b"), SendVersion)
    assert is_stuck(desk.coordinator._state, desk.coordinator._state.workers["w0"])


def test_a_late_loss_for_good_of_its_predecessor_keeps_no_worker_away() -> None:
    desk = running(num_workers=2)
    desk.join("w1")
    desk.join("w0", incarnation="b")
    desk.do(WorkerDraining(worker="w0", incarnation="b"))
    desk.do(WorkerLost(worker="w0", reason="silent", may_live=True))
    desk.do(WorkerLost(worker="w0", reason="killed", is_permanent=True, incarnation="a"))
    desk.join("w0", incarnation="b")
    worker = desk.coordinator._state.workers["w0"]
    assert (worker.is_present, worker.is_gone, worker.is_draining) == (True, False, True)


def test_a_draining_worker_gets_nothing_new_and_leaves_without_being_called_lost() -> None:
    desk = running()
    effects = desk.do(WorkerDraining(worker="w0"))
    assert only(effects, Note).text == "w0 is draining; its 2 running samples move to other workers"
    assert desk.do(WorkerDraining(worker="w0")) == [], "said once"
    for lease_id in list(desk.held):
        assert leased(desk.give_back(lease_id, 0, [], "drain")) == []
    left = only(desk.lose("w0"), Note)
    assert (left.kind, left.text) == ("worker_left", "w0 left (killed)")


def test_draining_of_an_unknown_or_an_earlier_process_is_ignored() -> None:
    desk = running()
    assert desk.do(WorkerDraining(worker="nobody")) == []
    assert desk.do(WorkerDraining(worker="w0", incarnation="earlier")) == []
    assert has(desk.do(WorkerDraining(worker="w0", incarnation="a")), Note)


def test_the_end_of_a_process_takes_its_leases_back_where_nobody_reported_the_loss() -> None:
    desk = running()
    note = only(desk.do(WorkerEnded(worker="w0")), Note)
    assert note.text == "w0 is lost (the worker's process has ended); 2 samples return to the queue"
    assert desk.do(WorkerEnded(worker="w0")) == []
    assert desk.do(WorkerEnded(worker="nobody")) == []


def state_with(*workers: Worker) -> RunState:
    state = RunState(CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=1))
    for worker in workers:
        state.workers[worker.name] = worker
    return state


@pytest.mark.parametrize(
    ("facts", "can"),
    [({}, True), ({"is_gone": True}, False), ({"is_draining": True}, False), ({"quarantine": "broken"}, False)],
)
def test_a_worker_can_be_spared_where_another_one_works_or_will_be_started_again(
    facts: dict[str, Any], can: bool
) -> None:
    state = state_with(Worker("w0"), made_worker("w1", **facts))
    assert worker_lifecycle.can_spare(state, ["w0"]) is can
    assert worker_lifecycle.can_spare(state, ["w0", "w1"]) is False


def test_a_speed_counts_only_where_it_is_positive_and_its_worker_is_there() -> None:
    state = state_with(Worker("w0", is_present=True), Worker("w1"))
    for name, tokens_per_s in (("w0", 8.0), ("w0", 0.0), ("w1", 8.0), ("nobody", 8.0)):
        worker_lifecycle.take_speed(state, WorkerSpeed(worker=name, tokens_per_s=tokens_per_s, steps_per_s=0.5))
    assert [(one.speed, one.steps_per_s) for one in state.workers.values()] == [(8.0, 0.5), (0.0, 0.0)]


def test_a_new_process_forgets_what_was_known_of_the_one_before() -> None:
    desk = running(load_retry_s=1.0)
    desk.do(WorkerSpeed(worker="w0", tokens_per_s=8.0, steps_per_s=0.5))
    desk.do(WorkerDraining(worker="w0"))
    desk.do(WorkerLost(worker="w0", reason="left", is_permanent=True))
    desk.join("w0", incarnation="b", capacity=4)
    (worker,) = desk.coordinator._state.workers.values()
    assert (worker.is_draining, worker.speed, worker.steps_per_s, worker.weights.quarantine) == (False, 0.0, 0.0, "")
    assert (worker.capacity, worker.num_slots, worker.is_present, worker.is_gone) == (4, 2, True, False)
    assert len(leased(desk.load("w0", 0))) == 2


@pytest.mark.parametrize(
    ("facts", "stuck"),
    [
        ({}, True), ({"load_attempts": 2}, False), ({"retry_at_s": 6.0}, False), ({"retry_at_s": 5.0}, True),
        ({"load_attempts": 2, "retry_at_s": 6.0}, False), ({"quarantine": ""}, False), ({"outstanding": {1}}, False),
        ({"load_due_s": 9.0}, False), ({"is_present": False}, False), ({"is_present": False, "is_gone": True}, True),
    ],
)  # fmt: skip
def test_a_worker_is_stuck_once_it_could_not_load_and_may_not_try_again(facts: dict[str, Any], stuck: bool) -> None:
    """At 5 s; it has tried as often as it may, which is three times, and holds nothing."""
    state = RunState(CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=1, max_load_attempts=3))
    state.now_s = 5.0
    usual = {"quarantine": "bad checksum", "load_attempts": 3, "retry_at_s": 0.0, "is_present": True}
    assert is_stuck(state, made_worker("w0", **{**usual, **facts})) == stuck
