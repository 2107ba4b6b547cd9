"""Claims about migration and draining: what moves, when, with which tokens, and what never happens."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, has, leased, only

from controller.coordinator import migration
from controller.coordinator.effects import Effect, Note, SendLeases, SendRecall, StoreFinished, StorePartial
from controller.coordinator.events import LeaseReturned, PartialReport, RunStarted, WorkerDraining, WorkerSpeed
from controller.coordinator.run_state import RunState

TAIL: dict[str, Any] = {
    "groups_per_step": 4, "group_size": 1, "num_steps": 1, "max_staleness": 0, "max_new_tokens": 200, "min_gain_s": 1.0,
}  # fmt: skip
"""Four answers and no more: once one worker is done, it idles."""


def tail(**changes: Any) -> Desk:
    """w0 holds two answers of 10 tokens each, w1 is done with its own; both are measured."""
    desk = Desk(**{**TAIL, **changes})
    desk.start(workers=("w0", "w1"), capacity=8)
    for worker in ("w0", "w1"):
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=10.0))
    for lease_id, (worker, order) in list(desk.held.items()):
        if worker == "w1":
            desk.finish(order.group_id)
        else:
            desk.progress(lease_id, 0, [0] * 10, worker="w0")
    return desk


def recalled(effects: list[Effect]) -> list[int]:
    return [lease_id for effect in effects if isinstance(effect, SendRecall) for lease_id in effect.lease_ids]


def test_running_answer_moves_to_an_idle_worker_by_its_tokens_so_far() -> None:
    desk = tail()
    effects = desk.tick(1.5)
    (lease_id,) = recalled(effects)
    assert only(effects, SendRecall).worker == "w0"
    assert not leased(effects), "nobody has it before it is given back"
    order = desk.held[lease_id][1]
    moved = desk.give_back(lease_id, 10, [0, 0, 0], "migrated")
    assert only(moved, StorePartial).num_tokens == 3
    (again,) = leased(moved)
    assert only(moved, SendLeases).worker == "w1"
    assert (again.group_id, again.prefix_tokens, again.moved_from) == (order.group_id, 13, "w0")
    assert [note.kind for note in moved if isinstance(note, Note)] == ["migrated"]


def test_nothing_moves_where_little_is_gained() -> None:
    assert not recalled(tail(min_gain_s=50.0).tick(1.5))


def test_nothing_moves_when_migration_is_off() -> None:
    assert not recalled(tail(migration=False).tick(1.5))


def test_nothing_moves_while_speeds_are_unknown() -> None:
    desk = Desk(**TAIL)
    desk.start(workers=("w0", "w1"), capacity=8)
    for worker, order in list(desk.held.values()):
        if worker == "w1":
            desk.finish(order.group_id)
    assert not recalled(desk.tick(5.0))


def test_nothing_moves_to_a_worker_without_an_idle_slot() -> None:
    desk = Desk(**{**TAIL, "groups_per_step": 16})
    desk.start(workers=("w0", "w1"), capacity=8)
    for worker, speed in (("w0", 1.0), ("w1", 100.0)):
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=speed))
    assert not recalled(desk.tick(1.5))


def test_nothing_moves_to_a_worker_that_would_be_done_with_it_later() -> None:
    desk = tail()
    desk.do(WorkerSpeed(worker="w1", tokens_per_s=1.0))
    assert not recalled(desk.tick(1.5)), "38 s where they are, 190 s for the first one there"


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_no_more_move_at_once_than_the_target_has_idle_slots(num_slots: int) -> None:
    """w0 has five answers and w1 none, which is a hundred times as fast."""
    desk = Desk(**{**TAIL, "groups_per_step": 10})
    desk.lineage = "l0"
    desk.do(RunStarted(lineage="l0"))
    for worker in ("w0", "w1"):
        desk.join(worker, capacity=8)
        desk.coordinator._state.workers[worker].num_slots = num_slots
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=10.0))
    desk.publish(0)
    for worker in ("w0", "w1"):
        desk.load(worker, 0)
    for worker, order in list(desk.held.values()):
        if worker == "w1":
            desk.finish(order.group_id)
    left = sum(worker == "w0" for worker, _ in desk.held.values())
    assert left >= 4
    desk.do(WorkerSpeed(worker="w1", tokens_per_s=1000.0))
    num_moved = len(recalled(desk.tick(1.5)))
    assert 1 <= num_moved <= num_slots


def test_answers_not_begun_move_first() -> None:
    desk = Desk(**{**TAIL, "groups_per_step": 8})
    desk.start(workers=("w0", "w1"), capacity=8)
    for worker in ("w0", "w1"):
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=10.0))
    mine = [lease_id for lease_id, (worker, _) in desk.held.items() if worker == "w0"]
    for lease_id in mine[:2]:
        desk.progress(lease_id, 0, [0] * 50, worker="w0")
    for worker, order in list(desk.held.values()):
        if worker == "w1":
            desk.finish(order.group_id)
    assert set(recalled(desk.tick(1.5))) <= set(mine[2:])


def loaded(state: RunState, name: str, version: int) -> None:
    state.workers[name].weights.load(version)
    state.workers.changed(state.workers[name])


def test_nothing_moves_to_a_worker_behind() -> None:
    """w1 idles with version 0; w0 has loaded version 1 and holds two answers."""
    desk = tail(num_steps=3, max_staleness=2, groups_per_step=2, on_stale="wait")
    state = desk.coordinator._state
    loaded(state, "w0", 1)
    assert not recalled(desk.tick(1.5))
    loaded(state, "w1", 1)
    assert recalled(desk.tick(1.5)), "once it has caught up"


def test_lease_that_nobody_handed_back_is_no_migration() -> None:
    desk = tail()
    orders = [order for _, order in desk.held.values()]
    assert {order.moved_from for order in [*leased(desk.effects), *orders]} == {""}
    assert not [note for note in desk.effects if isinstance(note, Note) and note.kind == "migrated"]


def test_sample_that_returns_to_the_worker_that_handed_it_back_has_not_moved() -> None:
    desk = Desk(**TAIL)
    desk.start(workers=("w0",), capacity=8)
    for _ in range(5):
        effects = desk.give_back(desk.lease_of(0), 0, [], "migrated")
        (order,) = leased(effects)
        assert order.moved_from == ""
        assert not [note for note in effects if isinstance(note, Note)]
    assert desk.coordinator._state.groups.table.live[0].samples[0].num_moves == 0


def test_next_wave_waits_for_the_answers_to_the_last() -> None:
    desk = tail()
    assert recalled(desk.tick(1.5))
    assert not recalled(desk.tick(1.5))


def test_recall_of_a_finished_answer_changes_nothing() -> None:
    desk = tail()
    (lease_id,) = recalled(desk.tick(1.5))
    effects = desk.finish(desk.held[lease_id][1].group_id)
    assert has(effects, StoreFinished)
    assert not has(effects, SendLeases)


def test_answer_moves_a_bounded_number_of_times() -> None:
    desk = tail(group_timeout_s=1e9)
    moves = 0
    for _ in range(40):
        for lease_id in recalled(desk.tick(2.0)):
            worker, order = desk.held[lease_id]
            moves += 1
            desk.do(WorkerSpeed(worker=worker, tokens_per_s=1000.0))
            desk.do(WorkerSpeed(worker="w1" if worker == "w0" else "w0", tokens_per_s=1.0))
            num_known = desk.coordinator._state.groups.table.live[order.group_id].samples[0].num_tokens
            desk.give_back(lease_id, num_known, [0], "migrated")
    assert 1 <= moves <= 4, "two answers, twice each"


def test_lost_worker_with_a_recall_gives_its_samples_back_once() -> None:
    desk = tail()
    (lease_id,) = recalled(desk.tick(1.5))
    effects = desk.lose("w0")
    assert len(leased(effects)) == 2
    assert all(order.prefix_tokens == 10 and order.moved_from == "" for order in leased(effects))
    assert not desk.do(LeaseReturned(
        worker="w0", part=PartialReport(lease_id=lease_id, start=10, num_tokens=0), reason="migrated"
    ))  # fmt: skip


def test_slow_workers_exchange_answers_like_fast_ones() -> None:
    desk = tail()
    for worker in ("w0", "w1"):
        desk.do(WorkerSpeed(worker=worker, tokens_per_s=0.5))
    assert recalled(desk.tick(1.5))


def test_worker_without_answers_has_nothing_to_wait_for() -> None:
    desk = tail()
    desk.do(WorkerSpeed(worker="w1", tokens_per_s=10.0, steps_per_s=0.5))
    state = desk.coordinator._state
    assert migration._Outlook(state, state.workers["w1"]).wait_s == 0.0


def test_group_changes_its_home_only_where_the_old_one_is_of_no_use() -> None:
    desk = tail()
    live = desk.coordinator._state.groups.table.live
    (lease_id,) = recalled(desk.tick(1.5))
    group_id = desk.held[lease_id][1].group_id
    (again,) = leased(desk.give_back(lease_id, 10, [0], "migrated"))
    assert (again.moved_from, live[group_id].home) == ("w0", "w0")
    (group_id,) = (order.group_id for worker, order in desk.held.values() if worker == "w0")
    desk.do(WorkerDraining(worker="w0"))
    (again,) = leased(desk.give_back(desk.lease_of(group_id), 10, [0], "drain"))
    assert (again.moved_from, live[group_id].home) == ("w0", "w1")


# ---------------------------------------------------------------- draining


def test_draining_worker_gets_nothing_and_its_samples_move_on() -> None:
    desk = Desk(groups_per_step=4, group_size=1, num_steps=9)
    desk.start(workers=("w0", "w1"), capacity=4)
    assert not leased(desk.do(WorkerDraining(worker="w0")))
    mine = [lease_id for lease_id, (worker, _) in desk.held.items() if worker == "w0"]
    for lease_id in mine:
        effects = desk.give_back(lease_id, 0, [0, 0], "drain")
        assert all(effect.worker == "w1" for effect in effects if isinstance(effect, SendLeases))
    left = desk.lose("w0", is_permanent=True)
    assert [note.kind for note in left if isinstance(note, Note)] == ["worker_left"]
    assert not any("w0" in line for line in desk.coordinator.waits())


def test_new_process_of_a_drained_worker_is_taken_in() -> None:
    desk = Desk(groups_per_step=4, group_size=1, num_steps=9)
    desk.start(workers=("w0", "w1"), capacity=4)
    desk.do(WorkerDraining(worker="w0"))
    desk.lose("w0", is_permanent=True)
    desk.join("w0", incarnation="b", capacity=4)
    assert any(effect.worker == "w0" for effect in desk.load("w0", 0) if isinstance(effect, SendLeases))


def test_worker_that_joins_in_mid_run_is_taken_in() -> None:
    desk = Desk(groups_per_step=8, group_size=1, num_steps=9)
    desk.start(workers=("w0",), capacity=4)
    desk.join("w7", capacity=4)
    assert any(effect.worker == "w7" for effect in desk.load("w7", 0) if isinstance(effect, SendLeases))


@pytest.mark.parametrize(("others", "wanted"), [((), False), (("w1",), True)])
def test_the_only_worker_cannot_be_spared(others: tuple[str, ...], wanted: bool) -> None:
    desk = Desk()
    desk.start(workers=("w0", *others))
    assert desk.coordinator.can_spare({"w0"}) is wanted
    assert not desk.coordinator.can_spare({"w0", "w1"})


def test_evaluation_on_a_draining_worker_goes_on_elsewhere() -> None:
    desk = Desk(groups_per_step=4, group_size=1, num_steps=9, num_eval_rows=2)
    desk.start(workers=("w0", "w1"), capacity=2)
    on_w0 = [order for worker, order in desk.held.values() if worker == "w0" and order.purpose == "eval"]
    effects = desk.do(WorkerDraining(worker="w0"))
    again = [order.group_id for order in leased(effects) if order.purpose == "eval"]
    held = [order.group_id for worker, order in desk.held.values() if worker == "w1" and order.purpose == "eval"]
    for row in {order.group_id for order in on_w0} - set(again):
        assert row not in held
    assert on_w0
