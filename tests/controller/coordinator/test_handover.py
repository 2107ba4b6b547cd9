"""The handover of shared devices: each case that once went wrong, and that the tables list every pair on purpose."""

from __future__ import annotations

import pytest
from desk import Desk, batch_of, has, leased, only, state_of

from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import Effect, EndWorker, Note, SendBatch, SendRelease, SendVersion
from controller.coordinator.events import TrainerRestarted, WorkerEnded, WorkerLost, WorkerReleased
from controller.coordinator.handover import (
    ENGINE,
    TURNS,
    Engine,
    EngineEvent,
    Turn,
    TurnEvent,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchRecord
from controller.coordinator.transitions import UnlistedTransition, transition


def released(desk: Desk, worker: str, number: int | None = None) -> list[Effect]:
    """The worker answers the last request, or that with `number`."""
    numbers = [e.number for e in desk.effects if isinstance(e, SendRelease) and e.worker == worker]
    return desk.do(WorkerReleased(worker=worker, number=numbers[-1] if number is None else number, num_bytes=1))


def restart_trainer(desk: Desk, lineage: str, checkpoint: int, *batches: BatchRecord) -> list[Effect]:
    desk.lineage = lineage
    event = TrainerRestarted(reason="killed", lineage=lineage, checkpoint_version=checkpoint, batches=batches)
    return desk.do(event)


def colocated(**settings: object) -> Desk:
    return Desk(mode="sync", is_colocated=True, load_deadline_s=10.0, **settings)


def resumed(num_batches: int) -> Desk:
    """A run of groups_per_step 1 with recorded batches and no checkpoint, resumed; its engine has loaded version 0."""
    settings = CoordinatorSettings(
        groups_per_step=1, group_size=1, num_steps=9, mode="sync", is_colocated=True, load_deadline_s=10.0
    )
    batches = tuple(batch_of(step, step - 1) for step in range(1, num_batches + 1))
    desk = Desk(Coordinator.restore(settings, state_of(num_drawn=num_batches, batches=batches)))
    desk.start()
    return desk


def test_a_trainer_that_replays_gets_the_next_batch_only_after_it_has_published_and_no_engine_takes_memory() -> None:
    desk = resumed(num_batches=3)
    desk.ask(1)
    assert only(released(desk, "w0"), SendBatch).step == 1
    assert not has(desk.ask(2), SendBatch), "it asks one step ahead, and would start step 2 while engines load"
    effects = desk.publish(1)
    assert only(effects, SendBatch).step == 2
    assert not has(effects, SendVersion)
    desk.ask(3)
    assert only(desk.publish(2), SendBatch).step == 3
    effects = desk.publish(3)
    assert only(effects, SendVersion).version == 3


def test_a_second_trainer_death_in_a_handover_leaves_no_lease_on_an_engine_that_releases_its_memory() -> None:
    desk = colocated()
    desk.start(capacity=1)
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    released(desk, "w0")
    desk.publish(1)
    desk.load("w0", 1)
    restart_trainer(desk, "l1", 0, batch_of(1, 0, 1))
    desk.publish(0)
    desk.ask(1)
    assert has(desk.finish(2, first=1), SendRelease), "between two leases"
    assert not leased(restart_trainer(desk, "l2", 0, batch_of(1, 0, 1))), "its engine is about to lose its version"
    assert not leased(released(desk, "w0"))
    desk.publish(0)
    assert only(desk.ask(1), SendBatch).step == 1
    assert only(desk.publish(1), SendVersion).version == 1
    assert [order.group_id for order in leased(desk.load("w0", 1))] == [3]


def test_a_late_answer_does_not_count_for_a_later_request() -> None:
    desk = colocated(num_workers=2)
    desk.start(workers=("w0", "w1"))
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    first = [e.number for e in desk.effects if isinstance(e, SendRelease) and e.worker == "w0"][-1]
    desk.do(WorkerLost(worker="w0", reason="unreachable", may_live=True))
    second = only(desk.join("w0"), SendRelease).number
    assert second != first
    released(desk, "w1")
    assert not has(released(desk, "w0", first), SendBatch), "the second request is still on its way to it"
    assert has(released(desk, "w0", second), SendBatch)
    desk.publish(1)
    desk.load("w1", 1)
    desk.finish(2, first=1)
    desk.finish(3, first=1)
    desk.ask(2)
    released(desk, "w1")
    assert not has(released(desk, "w0", second), SendBatch), "it was announced version 1 since"
    assert has(released(desk, "w0"), SendBatch)


def test_nothing_is_announced_to_an_engine_that_releases_its_memory() -> None:
    """The trainer died in the handover; the answer to its request is still to come."""
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    restart_trainer(desk, "l1", 0, batch_of(1, 0, 1))
    assert not has(desk.publish(0), SendVersion)
    assert only(released(desk, "w0"), SendVersion).version == 0


def test_a_batch_that_was_lost_on_its_way_is_sent_again_in_the_same_turn() -> None:
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    released(desk, "w0")
    assert only(desk.ask(1), SendBatch).step == 1


def test_a_killed_worker_frees_the_device_only_once_its_process_is_gone() -> None:
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    assert not has(desk.do(WorkerLost(worker="w0", reason="silent for 30 s", may_live=True)), SendBatch)
    assert has(desk.do(WorkerEnded(worker="w0")), SendBatch)


def test_a_message_that_came_after_the_report_of_its_loss_does_not_keep_a_dead_worker_present() -> None:
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.do(WorkerLost(worker="w0", reason="silent for 30 s", may_live=True))
    desk.join("w0")
    assert not has(desk.ask(1), SendBatch)
    assert has(desk.do(WorkerEnded(worker="w0")), SendBatch)
    assert not desk.coordinator._state.workers["w0"].is_present


def test_the_late_loss_of_a_predecessor_does_not_free_the_memory_of_the_process_that_follows_it() -> None:
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.do(WorkerLost(worker="w0", reason="unreachable", may_live=True))
    desk.do(WorkerLost(worker="w0", reason="killed", incarnation="an older one"))
    assert not has(desk.ask(1), SendBatch)
    assert any("w0 (unreachable)" in line for line in desk.coordinator.waits())
    assert has(desk.do(WorkerLost(worker="w0", reason="killed", incarnation="a")), SendBatch)


def releasing_behind_a_load() -> Desk:
    """Since second 5, w1 is to release its memory; version 1 was announced to it in second 0, and is loading still."""
    desk = colocated(num_workers=2)
    desk.start(workers=("w0", "w1"))
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    released(desk, "w0")
    released(desk, "w1")
    desk.publish(1)
    desk.load("w0", 1)
    desk.finish(2, first=1)
    desk.finish(3, first=1)
    desk.now_s = 5.0
    assert {effect.worker for effect in desk.ask(2) if isinstance(effect, SendRelease)} == {"w0", "w1"}
    released(desk, "w0")
    return desk


def test_a_release_behind_a_slow_load_has_its_time_after_the_deadline_of_the_load() -> None:
    desk = releasing_behind_a_load()
    assert not has(desk.tick(14.0), EndWorker), "the load may take until 10, and the release 10 s more"
    assert only(desk.tick(2.0), EndWorker).worker == "w1"


def test_a_repeated_request_does_not_shorten_the_time_for_a_release_behind_a_load() -> None:
    desk = releasing_behind_a_load()
    desk.do(WorkerLost(worker="w1", reason="unreachable", may_live=True))
    assert has(desk.join("w1"), SendRelease)
    assert not has(desk.tick(14.0), EndWorker)
    assert only(desk.tick(2.0), EndWorker).worker == "w1"


def test_a_version_whose_batch_is_held_back_is_refused_and_the_handover_goes_on() -> None:
    desk = colocated()
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    assert [note.kind for note in desk.publish(1) if isinstance(note, Note)] == ["ignored"]
    assert desk.coordinator.version == 0
    assert only(released(desk, "w0"), SendBatch).step == 1
    assert only(desk.publish(1), SendVersion).version == 1


def test_a_pair_that_is_not_listed_is_an_error_that_names_both() -> None:
    with pytest.raises(UnlistedTransition, match="'batch ready' must not happen in state 'trainer'"):
        transition(TURNS, Turn.TRAINER, TurnEvent.BATCH_READY)
    with pytest.raises(UnlistedTransition, match="'announced' must not happen in state 'releasing'"):
        transition(ENGINE, Engine.RELEASING, EngineEvent.ANNOUNCED)


def test_every_state_is_listed_and_can_be_reached_and_left() -> None:
    for table, states in ((TURNS, Turn), (ENGINE, Engine)):
        assert set(table) == set(states)
        targets = {target for state, row in table.items() for target, _ in row.values() if target is not state}
        assert targets == set(states), "of a table nothing is dead"
    for row in ENGINE.values():
        assert row[EngineEvent.ENDED][0] is Engine.EMPTY, "a dead process holds nothing"
