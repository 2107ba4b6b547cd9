"""The coordinator, scenario by scenario: admission, consumption, workers that come and go."""

from __future__ import annotations

import pickle

import pytest
from desk import Desk, has, leased, only

from controller.coordinator.effects import (
    DropGroup,
    Note,
    RecordBatch,
    SendAck,
    SendBatch,
    SendCancel,
    SendLeases,
    SendVersion,
    StoreFinished,
    StorePartial,
)
from controller.coordinator.events import SampleReported, WorkerLost
from controller.coordinator.sample_outcome import SampleOutcome

# ---------------------------------------------------------------- admission


def test_admission_stops_at_the_bound_and_goes_on_with_the_version_of_the_worker_that_takes_the_lease() -> None:
    desk = Desk(max_staleness=1)
    assert len(leased(desk.start(workers=("w0", "w1")))) == 4, "two steps' worth at version 0"
    for group_id in range(2):
        desk.finish(group_id)
    assert [group.group_id for group in only(desk.ask(1), SendBatch).groups] == [0, 1]
    assert leased(desk.publish(1)) == [], "no worker has version 1 yet"
    new = desk.load("w0", 1)
    assert {effect.worker for effect in new if isinstance(effect, SendLeases)} == {"w0"}
    assert [(order.group_id, order.min_version) for order in leased(new)] == [(4, 1), (5, 1)]


def test_ledger_effects_come_first() -> None:
    desk = Desk()
    desk.start()
    effects = desk.finish(0, kind="crashed")
    flags = [effect.is_ledger for effect in effects]
    assert flags == sorted(flags, reverse=True)
    assert flags[0]
    assert not flags[-1]


def test_sync_leases_a_whole_step_in_one_message_and_does_not_deadlock() -> None:
    desk = Desk(mode="sync", max_staleness=4, group_size=3, num_steps=3)
    first = desk.start()
    assert len(only(first, SendLeases).leases) == 6
    for step in (1, 2, 3):
        for group_id in (2 * step - 2, 2 * step - 1):
            for index in range(3):
                desk.finish(group_id, index, first=step - 1)
        assert only(desk.ask(step), SendBatch).step == step
        desk.publish(step)
        desk.load("w0", step)
    assert desk.coordinator.counts().drawn == 6


def test_one_step_off_starts_a_batch_only_when_the_one_before_is_finished() -> None:
    desk = Desk(mode="one_step_off", max_staleness=None)
    assert {order.group_id for order in leased(desk.start())} == {0, 1}
    assert leased(desk.finish(1)) == []
    assert {order.group_id for order in leased(desk.finish(0))} == {2, 3}, "generated while batch 1 trains"
    assert only(desk.ask(1), SendBatch).step == 1
    desk.finish(2)
    assert leased(desk.finish(3)) == [], "not two batches ahead"


def test_unbounded_starts_no_more_than_the_run_needs() -> None:
    desk = Desk(max_staleness=None, num_steps=3)
    assert len(leased(desk.start())) == 6


def test_a_group_stays_on_one_worker_and_the_first_to_load_takes_no_more_than_its_share() -> None:
    desk = Desk(group_size=4, groups_per_step=4, max_staleness=0)
    desk.start(workers=("w0", "w1"), capacity=16)
    by_worker: dict[str, list[int]] = {}
    for worker, order in desk.held.values():
        by_worker.setdefault(worker, []).append(order.group_id)
    assert by_worker == {"w0": [0] * 4 + [1] * 4, "w1": [2] * 4 + [3] * 4}
    assert len(only(desk.effects[-1:], SendLeases).leases) == 8, "one message"


# ---------------------------------------------------------------- consumption


def test_wait_holds_a_step_back_for_groups_that_must_go_several_steps_later() -> None:
    desk = Desk(groups_per_step=1, max_staleness=3)
    desk.start()  # groups 0 to 3 at version 0: deadline 4
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)  # group 4: deadline 5
    desk.finish(4, first=1)
    assert not has(desk.ask(2), SendBatch), "groups 1, 2, 3 need steps 2, 3 and 4"
    assert "unfinished groups" in desk.coordinator.waits()[0]
    assert only(desk.finish(2), SendBatch).groups[0].group_id == 2, "earliest deadline first"


def test_unknown_first_versions_count_with_the_admission_version() -> None:
    desk = Desk(groups_per_step=1, group_size=2, max_staleness=1)
    desk.start()  # groups 0 and 1, deadline 2
    for index in range(2):
        desk.finish(0, index)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)  # group 2, deadline 3
    desk.progress(desk.lease_of(1, 0), 0, [1])  # one sample of group 1 began under version 1, the other not yet
    for index in range(2):
        desk.finish(2, index, first=1)
    assert not has(desk.ask(2), SendBatch)
    effects = desk.progress(desk.lease_of(1, 1), 0, [1])
    assert only(effects, SendBatch).groups[0].group_id == 2, "now group 1 is known to last until step 3"


def test_drop_gives_up_a_running_group_as_soon_as_it_is_stale_and_replaces_it() -> None:
    desk = Desk(groups_per_step=1, max_staleness=1, on_stale="drop")
    desk.start()  # groups 0, 1: deadline 2
    desk.progress(desk.lease_of(1), 0, [0, 0])
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    desk.finish(2, first=1)
    effects = desk.ask(2)
    assert only(effects, SendBatch).groups[0].group_id == 2, "drop does not wait"
    assert only(effects, DropGroup) == DropGroup(group_id=1, reason="stale", detail="too old for step 3")
    assert has(effects, SendCancel)
    assert desk.coordinator.counts().dropped == {"stale": 1}
    assert leased(effects)[0].group_id == 3, "its place is free"


def test_keep_ships_what_is_ready() -> None:
    desk = Desk(groups_per_step=1, max_staleness=1, on_stale="keep")
    desk.start()
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    desk.finish(2, first=1)
    assert has(desk.ask(2), SendBatch)
    desk.publish(2)
    desk.finish(1)
    assert only(desk.ask(3), SendBatch).groups[0].first_version == 0, "staleness 2 in spite of the bound"


def test_the_trainer_may_ask_one_step_ahead_and_ask_again() -> None:
    desk = Desk(max_staleness=2)
    desk.start()
    for group_id in range(4):
        desk.finish(group_id)
    first = only(desk.ask(1), SendBatch)
    assert only(desk.ask(2), SendBatch).step == 2
    again = desk.ask(1)
    assert only(again, SendBatch) == first
    assert not has(again, RecordBatch)
    assert only(desk.ask(9), Note).kind == "ignored"


def test_a_group_past_its_wall_clock_deadline_is_dropped_and_its_leases_cancelled() -> None:
    desk = Desk(max_staleness=0, group_timeout_s=10.0)
    desk.start()
    lease_id = desk.lease_of(0)
    assert not has(desk.tick(9.0), DropGroup)
    desk.finish(1)
    effects = desk.tick(2.0)
    assert only(effects, DropGroup).reason == "timeout"
    assert only(effects, SendCancel).lease_ids == (lease_id,)
    assert leased(effects)[0].group_id == 2
    assert has(desk.report(lease_id, group_id=0), SendAck), "the late answer is acknowledged and not used"


def test_what_the_coordinator_remembers_does_not_grow_with_the_steps() -> None:
    desk = Desk(max_staleness=0, num_steps=400)
    desk.start()
    sizes = {}
    for step in range(1, 301):
        for group_id in (2 * step - 2, 2 * step - 1):
            desk.finish(group_id, first=step - 1)
        desk.ask(step)
        desk.publish(step)
        desk.load("w0", step)
        desk.tick(1.0)
        state = desk.coordinator._state
        sizes[step] = len(pickle.dumps(state)) - len(pickle.dumps(state.routing.lengths))  # a window, full at some time
    assert sizes[300] < sizes[30] + 200, "bytes; the ledger remembers, the coordinator need not"


# ---------------------------------------------------------------- workers that come and go


def test_a_lost_workers_samples_go_on_elsewhere_from_their_reported_tokens() -> None:
    desk = Desk(max_staleness=4, groups_per_step=1, num_steps=1)
    desk.start(workers=("w0", "w1"))
    assert desk.held[desk.lease_of(0)][0] == "w0"
    lease_id = desk.lease_of(0)
    stored = desk.progress(lease_id, 0, [0, 0, 0])
    assert only(stored, StorePartial).num_tokens == 3
    assert only(desk.progress(lease_id, 1, [0, 0, 0]), StorePartial).skip == 2, "an overlap is cut off"
    assert not has(desk.progress(lease_id, 9, [0]), StorePartial), "a hole is not stored"
    (order,) = leased(desk.lose("w0"))
    assert (order.group_id, order.prefix_tokens, order.min_version) == (0, 4, 0)


def test_continuations_go_only_to_workers_that_have_the_version_of_their_last_token() -> None:
    desk = Desk(max_staleness=2, groups_per_step=1)
    desk.start(workers=("w0", "w1"), capacity=1)
    lease_id = desk.lease_of(0)
    desk.finish(1)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    desk.progress(lease_id, 0, [0, 1])
    assert [order for order in leased(desk.lose("w0")) if order.group_id == 0] == []
    desk.finish(desk.held[next(iter(desk.held))][1].group_id)
    orders = leased(desk.load("w1", 1))
    assert [(o.group_id, o.min_version, o.prefix_tokens) for o in orders if o.group_id == 0] == [(0, 1, 2)]


def test_late_and_duplicate_answers_are_used_once_and_all_acknowledged() -> None:
    desk = Desk(max_staleness=0, groups_per_step=1, num_steps=1)
    desk.start(workers=("w0", "w1"))
    old = desk.lease_of(0)
    desk.lose("w0")
    new = desk.lease_of(0)
    assert new != old
    late = desk.report(old, group_id=0, worker="w0")
    assert only(late, StoreFinished).outcome.lease_id == old, "first come, first kept"
    assert only(late, SendCancel) == SendCancel(worker="w1", lease_ids=(new,))
    for lease_id, worker in ((old, "w0"), (new, "w1")):
        effects = desk.report(lease_id, group_id=0, worker=worker)
        assert not has(effects, StoreFinished)
        assert only(effects, SendAck).lease_ids == (lease_id,)


def test_a_late_answer_older_than_its_groups_floor_is_refused() -> None:
    """Else its deadline would come forward, and the step that must use it may have been shipped without it."""
    desk = Desk(groups_per_step=1, max_staleness=1, num_steps=9)
    desk.start(workers=("w0", "w1"), capacity=2)
    old = desk.lease_of(0)
    desk.finish(1)
    desk.ask(1)
    desk.publish(1)
    desk.load("w1", 1)
    desk.lose("w0")
    new = desk.lease_of(0)
    assert desk.held[new][0] == "w1"
    desk.progress(new, 0, [1, 1], worker="w1")  # group 0 now has first version 1, deadline 3
    effects = desk.report(old, group_id=0, worker="w0", first=0)
    assert not has(effects, StoreFinished)
    assert has(effects, SendAck)
    assert has(desk.report(new, group_id=0, worker="w1", first=1), StoreFinished)


def test_a_worker_that_comes_back_is_asked_to_stop_what_others_took_over() -> None:
    desk = Desk(max_staleness=0)
    desk.start(workers=("w0", "w1"))
    held = sorted(i for i, (worker, _) in desk.held.items() if worker == "w0")
    desk.lose("w0")
    assert list(only(desk.join("w0"), SendCancel).lease_ids) == held


def test_a_new_process_of_the_same_name_starts_with_nothing_and_its_predecessors_death_is_old_news() -> None:
    desk = Desk(max_staleness=0)
    desk.start()
    effects = desk.join("w0", incarnation="b")
    assert only(effects, SendVersion).version == 0
    assert leased(effects) == []
    assert len(leased(desk.load("w0", 0))) == 2
    assert desk.do(WorkerLost(worker="w0", reason="killed", incarnation="a")) == []


def test_a_sample_lost_again_and_again_drops_its_group() -> None:
    desk = Desk(max_staleness=0, groups_per_step=1, max_sample_losses=2)
    desk.start()
    for attempt in "bcd":
        desk.lose("w0")
        desk.join("w0", incarnation=attempt)
        desk.load("w0", 0)
    assert desk.coordinator.counts().dropped == {"lost_too_often": 1}


def test_segments_and_drained_samples_are_leased_again_with_their_tokens() -> None:
    desk = Desk(max_staleness=0, groups_per_step=1, max_sample_losses=0)
    desk.start()
    for num_tokens, reason in ((2, "segment"), (4, "drain")):
        (order,) = leased(desk.give_back(desk.lease_of(0), num_tokens - 2, [0, 0], reason))
        assert order.prefix_tokens == num_tokens


@pytest.mark.parametrize(("num_tokens", "first", "last"), [(0, 0, 0), (5, 1, 0), (5, 0, -1)])
def test_a_finished_sample_without_tokens_or_with_versions_that_decrease_is_refused(
    num_tokens: int, first: int, last: int
) -> None:
    desk = Desk(max_staleness=1, groups_per_step=1)
    desk.start()
    effects = desk.do(
        SampleReported(
            worker="w0",
            outcome=SampleOutcome(
                lease_id=desk.lease_of(0), group_id=0, sample_index=0, num_tokens=num_tokens,
                first_version=first, last_version=last, verdict_kind="scored", value=1.0,
            ),
        )
    )  # fmt: skip
    assert "no tokens, or versions that decrease" in only(effects, Note).text
    assert not has(effects, StoreFinished)
    assert has(effects, SendAck)
    assert leased(effects)[0].group_id == 0, "sampled again"


def test_a_segment_without_a_new_token_is_a_loss() -> None:
    desk = Desk(max_staleness=0, groups_per_step=1, max_sample_losses=2)
    desk.start()
    desk.progress(desk.lease_of(0), 0, [0, 0])
    desk.give_back(desk.lease_of(0), 2, [], "segment")
    for _ in range(3):
        assert desk.coordinator.counts().dropped == {}
        desk.give_back(desk.lease_of(0), 2, [], "segment")
    assert desk.coordinator.counts().dropped == {"lost_too_often": 1}


def test_a_segment_whose_tokens_a_progress_report_brought_is_no_loss() -> None:
    desk = Desk(max_staleness=0, groups_per_step=1, max_sample_losses=0)
    desk.start()
    for start in (0, 2, 4):
        lease_id = desk.lease_of(0)
        desk.progress(lease_id, start, [0, 0])
        (order,) = leased(desk.give_back(lease_id, start + 2, [], "segment"))
        assert order.prefix_tokens == start + 2
    assert desk.coordinator.counts().dropped == {}


def test_a_worker_that_cannot_load_is_quarantined_and_tried_again_while_others_go_on() -> None:
    desk = Desk(max_staleness=1, groups_per_step=1, load_retry_s=5.0, max_load_attempts=2)
    desk.start(workers=("w0", "w1"), capacity=1)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    assert only(desk.fail("w1", 1), Note).kind == "quarantined"
    assert any("w1 is quarantined" in line for line in desk.coordinator.waits())
    assert {w for e in desk.load("w0", 1) if isinstance(e, SendLeases) for w in [e.worker]} <= {"w0"}
    assert only(desk.tick(6.0), SendVersion).worker == "w1"
    desk.fail("w1", 1)
    assert not has(desk.tick(60.0), SendVersion), "bounded retries"
    desk.load("w1", 1)
    assert not any("quarantined" in line for line in desk.coordinator.waits())


def test_tokens_below_the_minimum_version_are_refused() -> None:
    desk = Desk(max_staleness=1, groups_per_step=1)
    desk.start()
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)
    effects = desk.finish(2, first=0)
    assert only(effects, Note).kind == "refused"
    assert has(effects, SendAck)
    assert leased(effects)[0].group_id == 2, "sampled again"
