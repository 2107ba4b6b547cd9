"""Claims about versions on their way to several workers: turns, deadlines, quarantine and coming back."""

from __future__ import annotations

from desk import Desk, has, only
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.coordinator.effects import Effect, Note, SendSwap, SendVersion
from controller.coordinator.events import WorkerVersionStaged


def staged(desk: Desk, worker: str, version: int) -> list[Effect]:
    return desk.do(WorkerVersionStaged(worker=worker, version=version, lineage=desk.lineage))


def turns(effects: list[Effect]) -> list[str]:
    return [effect.worker for effect in effects if isinstance(effect, SendSwap)]


def rolling(num_workers: int = 3, **settings) -> Desk:
    desk = Desk(swap="rolling", load_deadline_s=10.0, num_workers=num_workers, **settings)
    desk.start(workers=tuple(f"w{number}" for number in range(num_workers)))
    advance(desk)
    return desk


def advance(desk: Desk) -> None:
    """The trainer has taken a batch, so that the next version may be published."""
    desk.ask(desk.coordinator.shipped + 1)
    for lease_id in list(desk.held):
        if lease_id in desk.held:
            worker, order = desk.held[lease_id]
            desk.report(lease_id, group_id=order.group_id, worker=worker, first=max(desk.coordinator.version, 0))


def test_a_worker_that_is_too_late_and_then_loads_an_older_version_is_announced_the_newest_again() -> None:
    """Nothing would be expected of it otherwise: neither another attempt nor the end of a run without workers."""
    desk = Desk(max_staleness=4, load_deadline_s=10.0, max_load_attempts=2)
    desk.start()
    for version in (1, 2):
        desk.finish(2 * version - 2)
        desk.finish(2 * version - 1)
        desk.ask(version)
        desk.publish(version)
    assert has(desk.tick(10.5), Note), "it is quarantined"
    desk.load("w0", 1)
    sent = only(desk.tick(0.5), SendVersion)
    assert (sent.worker, sent.version) == ("w0", 2)
    assert "quarantined" in {effect.kind for effect in desk.tick(10.5) if isinstance(effect, Note)}
    assert only(desk.tick(10.0), SendVersion).version == 2


def test_a_worker_that_has_the_turn_and_is_said_again_to_have_staged_keeps_it() -> None:
    desk = rolling(num_workers=2)
    desk.publish(1)
    assert turns(staged(desk, "w1", 1)) == ["w1"]
    assert turns(staged(desk, "w0", 1)) == []
    assert turns(staged(desk, "w1", 1)) == [], "two would swap at once"
    assert turns(desk.load("w1", 1)) == ["w0"]


def test_a_worker_that_has_swapped_and_is_said_again_to_have_staged_gets_no_turn() -> None:
    """It would not swap again, and be quarantined for that."""
    desk = rolling(num_workers=1)
    desk.publish(1)
    assert turns(staged(desk, "w0", 1)) == ["w0"]
    desk.load("w0", 1)
    assert turns(staged(desk, "w0", 1)) == []
    assert not has(desk.tick(10.5), Note)


def test_together_nobody_is_held_and_nobody_needs_a_turn():
    desk = Desk(num_workers=2)
    desk.start(workers=("w0", "w1"))
    advance(desk)
    sent = [effect for effect in desk.publish(1) if isinstance(effect, SendVersion)]
    assert [(effect.worker, effect.is_held) for effect in sent] == [("w0", False), ("w1", False)]
    assert not has(desk.effects, SendSwap)


def test_rolling_all_stage_at_once_and_swap_one_after_another():
    desk = rolling()
    assert all(not effect.is_held for effect in desk.effects if isinstance(effect, SendVersion))  # the first version
    sent = [effect for effect in desk.publish(1) if isinstance(effect, SendVersion)]
    assert [(effect.worker, effect.is_held) for effect in sent] == [("w0", True), ("w1", True), ("w2", True)]
    assert turns(staged(desk, "w1", 1)) == ["w1"]
    assert turns(staged(desk, "w0", 1) + staged(desk, "w2", 1)) == []
    assert any("w2 has staged version 1" in line for line in desk.coordinator.waits())
    assert turns(desk.load("w1", 1)) == ["w0"]
    assert turns(desk.load("w0", 1)) == ["w2"]
    assert turns(desk.load("w2", 1)) == []


def test_a_worker_that_fails_or_dies_in_its_turn_passes_it_on():
    desk = rolling()
    desk.publish(1)
    for worker in ("w0", "w1", "w2"):
        staged(desk, worker, 1)
    assert turns(desk.fail("w0", 1)) == ["w1"]
    assert turns(desk.lose("w1")) == ["w2"]


def test_a_worker_that_misses_the_deadline_is_quarantined_and_the_others_go_on():
    desk = rolling()
    desk.publish(1)
    staged(desk, "w0", 1)
    staged(desk, "w1", 1)
    effects = desk.tick(10.5)
    notes = [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "quarantined"]
    assert sorted(notes) == [
        "w0 cannot load version 1: it did not load the version within 10 s",
        "w2 cannot load version 1: it did not receive the version within 10 s",
    ]
    assert turns(effects) == ["w1"]
    desk.load("w0", 1)
    assert not any("w0 is quarantined" in line for line in desk.coordinator.waits())


def test_a_late_worker_that_staged_after_all_gets_its_turn_and_is_back():
    desk = rolling(num_workers=1)
    desk.publish(1)
    assert only(desk.tick(10.5), Note).kind == "quarantined"
    assert turns(staged(desk, "w0", 1)) == ["w0"]
    desk.load("w0", 1)
    assert not any("quarantined" in line for line in desk.coordinator.waits())


def test_waiting_for_a_turn_is_not_the_workers_fault():
    desk = rolling(num_workers=2)
    desk.publish(1)
    for worker in ("w0", "w1"):
        staged(desk, worker, 1)
    desk.tick(9.0)
    desk.load("w0", 1)
    desk.tick(9.0)
    assert not any("quarantined" in line for line in desk.coordinator.waits())


def test_a_newer_version_replaces_a_staged_one_and_who_is_furthest_behind_comes_first():
    desk = rolling(num_workers=2)
    desk.publish(1)
    staged(desk, "w1", 1)
    staged(desk, "w0", 1)
    desk.load("w1", 1)
    advance(desk)
    sent = [effect for effect in desk.publish(2) if isinstance(effect, SendVersion)]
    assert {effect.worker for effect in sent} == {"w0", "w1"}
    assert turns(staged(desk, "w1", 2)) == ["w1"]  # it alone is ready
    assert turns(staged(desk, "w0", 1)) == []  # of the old version, crossed on the way
    assert turns(staged(desk, "w0", 2)) == []
    assert turns(desk.load("w1", 2)) == ["w0"]


def test_a_worker_that_was_away_catches_up_at_once():
    desk = rolling(num_workers=2)
    desk.lose("w1")
    desk.publish(1)
    effects = desk.join("w1", incarnation="b")
    sent = only(effects, SendVersion)
    assert (sent.worker, sent.version, sent.is_held) == ("w1", 1, False)  # nothing runs on it: nothing to wait for


@settings(max_examples=num_examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["stage", "load", "fail", "lose", "join", "tick"]), st.integers(0, 3))))
def test_never_two_turns_at_once_and_never_a_turn_without_a_staged_version(history):
    desk = rolling(num_workers=4)
    desk.publish(1)
    ready: set[str] = set()
    swapping: set[str] = set()
    for action, number in history:
        worker, effects = f"w{number}", []
        if action == "stage" and worker not in swapping:
            effects = staged(desk, worker, 1)
            ready.add(worker)
        elif action == "load" and worker in swapping:
            swapping.discard(worker)
            ready.discard(worker)
            effects = desk.load(worker, 1)
        elif action == "fail":
            swapping.discard(worker)
            ready.discard(worker)
            effects = desk.fail(worker, 1)
        elif action == "lose":
            swapping.discard(worker)
            ready.discard(worker)
            effects = desk.lose(worker)
        elif action == "join":
            swapping.discard(worker)
            ready.discard(worker)
            effects = desk.join(worker, incarnation=f"{len(desk.effects)}")
        elif action == "tick":
            swapping.clear()
            effects = desk.tick(11.0)
        for name in turns(effects):
            assert name in ready
            assert not swapping
            swapping.add(name)
