"""Workers that the run did not start join, leave, are killed and return: the invariants hold, and the run finishes."""

from __future__ import annotations

import random

import pytest
from desk import Desk, has, leased, only
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import ELASTIC, random_settings, run_schedule

from controller.coordinator import usable_workers, worker_lifecycle
from controller.coordinator.effects import Note, SendCancel
from controller.coordinator.events import WorkerJoined, WorkerLost
from controller.coordinator.run_state import RunState

NUM_SCHEDULES = 100


def join_external(desk: Desk, name: str, incarnation: str = "a", capacity: int = 4) -> None:
    desk.do(WorkerJoined(worker=name, incarnation=incarnation, capacity=capacity, is_external=True))


def run_elastic(seed: int, num_actions: int = 150) -> None:
    cluster = run_schedule(seed, more=ELASTIC, num_actions=num_actions)
    assert cluster.end is not None
    if cluster.end.status == "failed":
        assert any(words in cluster.end.reason for words in ("prompts were rejected", "no rollout worker is left"))


def test_schedules_with_workers_that_come_and_go_keep_the_invariants_and_finish() -> None:
    num_joined = 0
    for seed in range(NUM_SCHEDULES):
        cluster = run_schedule(seed, more=ELASTIC)
        num_joined += sum(worker.is_external for worker in cluster.workers.values())
        assert cluster.end is not None
    assert num_joined > NUM_SCHEDULES, "the schedules have something to find"


@given(seed=st.integers(0, 1_000_000), num_actions=st.integers(1, 250))
@settings(deadline=None)
def test_any_schedule_with_workers_that_come_and_go_ends(seed: int, num_actions: int) -> None:
    run_elastic(seed, num_actions)


def test_external_workers_are_not_those_that_the_run_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard in `num_expected`: without it a run ends when an external worker is lost before its own have joined."""
    desk = Desk(num_workers=1)
    desk.start(workers=())
    join_external(desk, "rollout-7")
    desk.do(WorkerLost(worker="rollout-7", reason="killed", is_permanent=True))
    state = desk.coordinator._state
    assert not usable_workers.has_no_usable_workers(state)
    assert "controller waits for 1 rollout worker(s) to register" in desk.coordinator.waits()
    monkeypatch.setattr(usable_workers, "num_expected", lambda state: 1 - len(state.workers))
    assert usable_workers.has_no_usable_workers(state), "the mutant is caught"


def test_a_worker_of_the_run_is_not_drained_for_the_sake_of_external_ones() -> None:
    desk = Desk()
    desk.start()
    join_external(desk, "rollout-7")
    assert not desk.coordinator.can_spare({"w0"})
    assert desk.coordinator.can_spare({"rollout-7"})


def test_an_external_worker_gets_samples_and_returns_them_when_it_is_lost() -> None:
    desk = Desk(groups_per_step=8, group_size=1, max_staleness=4)
    desk.start(capacity=1)
    join_external(desk, "rollout-7")
    desk.load("rollout-7", 0)
    held = [lease_id for lease_id, (worker, _) in desk.held.items() if worker == "rollout-7"]
    assert held
    note = only(desk.do(WorkerLost(worker="rollout-7", reason="killed", is_permanent=True)), Note)
    assert note.text == f"rollout-7 is lost (killed); {len(held)} samples return to the queue"


@pytest.mark.parametrize("may_return", [True, False])
def test_only_a_silent_external_worker_returns_as_the_same_process(may_return: bool) -> None:
    desk = Desk(groups_per_step=8, group_size=1, max_staleness=4)
    desk.start(capacity=1)
    join_external(desk, "rollout-7")
    desk.load("rollout-7", 0)
    desk.do(WorkerLost(worker="rollout-7", reason="silent", is_permanent=True, may_return=may_return))
    effects = desk.do(WorkerJoined(worker="rollout-7", incarnation="a", capacity=4, is_external=True))
    assert has(effects, SendCancel) == bool(leased(effects)) == may_return
    assert desk.coordinator._state.workers["rollout-7"].is_present == may_return


def test_a_lost_external_worker_keeps_no_run_waiting() -> None:
    """Its loss is permanent: `can_spare` must not count on its return."""
    state = RunState(random_settings(random.Random(0)))
    worker_lifecycle.join(state, WorkerJoined(worker="x", incarnation="a", capacity=1, is_external=True))
    worker_lifecycle.lose(state, WorkerLost(worker="x", reason="silent", is_permanent=True, may_return=True))
    assert usable_workers.is_stuck(state, state.workers["x"])
