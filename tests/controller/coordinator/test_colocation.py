"""Devices that engines and trainer share are the one's or the other's, in turns, and nobody waits for the dead."""

from __future__ import annotations

import random

import msgspec
import pytest
from desk import Desk, batch_of, has, leased, only
from example_counts import num_examples
from schedules import random_settings
from virtual_cluster import VirtualCluster

from controller.coordinator import leasing
from controller.coordinator.effects import (
    Effect,
    EndRun,
    EndWorker,
    EvalDropped,
    Note,
    RecordBatch,
    SendBatch,
    SendLeases,
    SendRelease,
    SendVersion,
)
from controller.coordinator.events import TrainerRestarted, WorkerLost, WorkerReleased
from controller.coordinator.handover import Turn


def released(desk: Desk, worker: str) -> list[Effect]:
    """The worker answers the last request."""
    numbers = [e.number for e in desk.effects if isinstance(e, SendRelease) and e.worker == worker]
    return desk.do(WorkerReleased(worker=worker, number=numbers[-1], num_bytes=100))


def ready(**settings: object) -> Desk:
    """Two workers have made the first batch, and the trainer asks for it."""
    desk = Desk(mode="sync", is_colocated=True, num_workers=2, load_deadline_s=10.0, **settings)
    desk.start(workers=("w0", "w1"))
    for group_id in (0, 1):
        desk.finish(group_id)
    return desk


def test_the_batch_waits_until_every_engine_has_released_its_memory() -> None:
    desk = ready()
    effects = desk.ask(1)
    assert has(effects, RecordBatch), "what it consists of is settled at once"
    assert {e.worker for e in effects if isinstance(e, SendRelease)} == {"w0", "w1"}
    assert not has(effects, SendBatch)
    assert not has(released(desk, "w0"), SendBatch)
    assert any("w1 to release memory" in line for line in desk.coordinator.waits())
    assert only(released(desk, "w1"), SendBatch).step == 1


def test_nothing_is_announced_or_leased_in_the_trainers_time() -> None:
    desk = ready()
    desk.ask(1)
    released(desk, "w0")
    released(desk, "w1")
    joined = desk.join("w2")
    assert not has(joined, SendVersion)
    assert not leased(joined)
    assert not has(desk.tick(1.0), SendVersion)
    effects = desk.publish(1)
    assert {e.worker for e in effects if isinstance(e, SendVersion)} == {"w0", "w1", "w2"}
    assert leased(desk.load("w0", 1))


def test_a_batch_waits_for_an_evaluation_that_needs_the_engines() -> None:
    desk = ready(num_eval_rows=1, eval_every_steps=1, eval_at_start=False)
    desk.ask(1)
    released(desk, "w0")
    released(desk, "w1")
    desk.publish(1)
    desk.load("w0", 1)
    desk.load("w1", 1)
    desk.finish(2, first=1)
    desk.finish(3, first=1)
    assert not has(desk.ask(2), RecordBatch)
    assert has(desk.finish(0, purpose="eval", first=1), SendRelease)


def test_a_batch_does_not_wait_for_an_evaluation_on_a_worker_that_is_late_with_its_version() -> None:
    """The other worker makes the evaluation; before, the trainer waited until its deadline."""
    desk = ready(num_eval_rows=1, eval_every_steps=1, eval_at_start=False, group_timeout_s=1e6)
    desk.ask(1)
    released(desk, "w0")
    released(desk, "w1")
    desk.publish(1)
    (pinned,) = desk.coordinator._state.evaluations.jobs[0].workers
    desk.load("w1" if pinned == "w0" else "w0", 1)
    desk.finish(2, first=1)
    desk.finish(3, first=1)
    assert not has(desk.ask(2), RecordBatch)
    desk.tick(10.5)
    desk.tick(1.0)
    assert has(desk.finish(0, purpose="eval", first=1), RecordBatch)


def test_a_request_to_release_memory_names_the_process_it_is_meant_for() -> None:
    desk = ready()
    desk.join("w1", "b")
    asked = {(e.worker, e.incarnation) for e in desk.ask(1) if isinstance(e, SendRelease)}
    assert asked == {("w0", "a"), ("w1", "b")}


def test_an_evaluation_of_a_version_that_nobody_can_load_does_not_end_the_run() -> None:
    desk = Desk(
        is_colocated=True, groups_per_step=1, num_eval_rows=1, eval_every_steps=1, eval_at_start=False, max_staleness=2
    )
    desk.start()
    for group_id in (0, 1, 2):
        desk.finish(group_id)
    desk.ask(1)
    released(desk, "w0")
    desk.publish(1)
    desk.ask(2)
    for _ in range(desk.coordinator.settings.max_load_attempts):
        desk.fail("w0", 1)
        desk.tick(10.0)
    assert not has(desk.effects, EndRun), "two groups are ready for the next step"
    assert only(released(desk, "w0"), SendBatch).step == 2
    desk.publish(2)
    desk.load("w0", 2)
    evaluated = {effect.kind for effect in desk.effects if isinstance(effect, Note)}
    assert "eval_repinned" in evaluated or has(desk.effects, EvalDropped)


def test_an_engine_that_keeps_its_memory_is_ended_and_its_death_frees_the_trainer() -> None:
    desk = ready()
    desk.ask(1)
    released(desk, "w0")
    assert not has(desk.tick(9.0), EndWorker)
    assert only(desk.tick(2.0), EndWorker).worker == "w1"
    assert not has(desk.tick(20.0), EndWorker), "once"
    assert has(desk.lose("w1"), SendBatch)


def test_a_worker_that_was_out_of_reach_is_asked_again() -> None:
    desk = ready()
    desk.ask(1)
    released(desk, "w0")
    desk.do(WorkerLost(worker="w1", reason="unreachable", may_live=True))
    assert not has(desk.tick(1.0), SendBatch), "it may hold its memory still"
    assert only(desk.join("w1"), SendRelease).worker == "w1"
    assert has(released(desk, "w1"), SendBatch)


def test_a_batch_held_for_a_trainer_that_died_is_void_and_the_next_life_gets_it_in_its_own_turn() -> None:
    desk = ready()
    desk.ask(1)
    released(desk, "w0")
    desk.lineage = "l1"
    batches = (batch_of(1, 0, 1),)
    desk.do(TrainerRestarted(reason="trainer: killed", lineage="l1", checkpoint_version=0, batches=batches))
    assert not has(released(desk, "w1"), SendBatch), "there is nobody to take it"
    assert {e.worker for e in desk.publish(0) if isinstance(e, SendVersion)} == {"w0", "w1"}
    desk.load("w0", 0)
    desk.load("w1", 0)
    desk.ask(1)
    assert not has(released(desk, "w0"), SendBatch)
    batch = only(released(desk, "w1"), SendBatch)
    assert (batch.step, batch.lineage, batch.is_replay) == (1, "l1", True)


def test_separate_devices_know_no_handover() -> None:
    desk = Desk(mode="sync")
    desk.start()
    desk.finish(0)
    desk.finish(1)
    effects = desk.ask(1)
    assert has(effects, SendBatch)
    assert not has(effects, SendRelease)
    assert desk.coordinator._state.devices.turn is Turn.SETUP, "the tables are not used"


ACTIONS = (
    "deliver", "deliver", "deliver_burst", "generate", "generate", "load_version", "release", "release",
    "request_batch", "finish_step", "tick", "restart_worker", "come_back", "resend", "leave", "start_trainer",
)  # fmt: skip
FAULTS = ("kill_worker", "silence", "duplicate", "fail_to_load", "drain_worker", "kill_trainer", "crash")


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_under_random_schedules_with_faults_memory_is_never_held_twice_and_every_run_ends(first: int) -> None:
    for seed in range(first, first + num_examples(40)):
        rng = random.Random(seed)
        settings = msgspec.structs.replace(
            random_settings(rng), mode="sync", is_colocated=True, load_deadline_s=5.0, num_workers=2
        )
        cluster = VirtualCluster(settings, rng, failure_rate=rng.choice([0.0, 0.1]))
        weights = [1.0] * len(ACTIONS) + [rng.choice([0.0, 0.2, 0.6])] * len(FAULTS)
        for action in rng.choices((*ACTIONS, *FAULTS), weights, k=120):
            if cluster.end is not None:
                break
            getattr(cluster, action)()
        cluster.run_to_end()
        cluster.check_end()


@pytest.mark.parametrize("turn", list(Turn))
def test_sample_that_waits_is_leased_in_the_engines_time_alone(turn: Turn) -> None:
    """Even while a worker that is usable still has credits."""
    desk = ready()
    state = desk.coordinator._state
    group = state.groups.table.add(2, 0)
    state.groups.table.push_pending(group, group.samples[0])
    state.devices.turn = turn
    leasing.assign(state)
    assert (group.samples[0].lease_id is not None) == (turn is Turn.ENGINES)
    assert has(state.take_effects(), SendLeases) == (turn is Turn.ENGINES)
