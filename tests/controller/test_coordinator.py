"""The coordinator, scenario by scenario."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from areal_like.errors import UserError
from controller import protocol as p
from controller.coordinator import Coordinator
from controller.settings import CoordinatorSettings

E = TypeVar("E", bound=p.Effect)


class Desk:
    """A coordinator with short names for events; keeps every effect and who holds which lease."""

    def __init__(self, coordinator: Coordinator | None = None, **settings: Any) -> None:
        chosen = {"groups_per_step": 2, "group_size": 1, "num_steps": 9, **settings}
        self.coordinator = coordinator or Coordinator(CoordinatorSettings(**chosen))
        self.now_s = 0.0
        self.effects: list[p.Effect] = []
        self.held: dict[int, tuple[str, p.LeaseOrder]] = {}

    def do(self, event: p.Event) -> list[p.Effect]:
        effects = self.coordinator.handle(event, self.now_s)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, p.SendLeases):
                self.held |= {order.lease_id: (effect.worker, order) for order in effect.leases}
            elif isinstance(effect, p.SendCancel | p.SendAck):
                for lease_id in effect.lease_ids:
                    self.held.pop(lease_id, None)
        assert self.coordinator.counts().add_up()
        return effects

    def start(self, *, workers: tuple[str, ...] = ("w0",), capacity: int = 64, checkpoint: int = 0) -> list[p.Effect]:
        life = "l1" if self.coordinator.shipped or checkpoint else "l0"
        self.lineage = life
        effects = self.do(p.RunStarted(lineage=life, checkpoint_version=checkpoint))
        for worker in workers:
            effects += self.join(worker, capacity=capacity)
        effects += self.publish(checkpoint)
        for worker in workers:
            effects += self.load(worker, checkpoint)
        return effects

    def join(self, worker: str, incarnation: str = "a", capacity: int = 64) -> list[p.Effect]:
        return self.do(p.WorkerJoined(worker=worker, incarnation=incarnation, capacity=capacity))

    def lose(self, worker: str, *, is_permanent: bool = False) -> list[p.Effect]:
        for lease_id in [i for i, (holder, _) in self.held.items() if holder == worker]:
            del self.held[lease_id]
        return self.do(p.WorkerLost(worker=worker, reason="killed", is_permanent=is_permanent))

    def publish(self, version: int) -> list[p.Effect]:
        return self.do(p.Published(version=version, lineage=self.lineage, manifest_path=f"v{version}"))

    def load(self, worker: str, version: int) -> list[p.Effect]:
        return self.do(p.WorkerVersionLoaded(worker=worker, version=version, lineage=self.lineage))

    def fail(self, worker: str, version: int) -> list[p.Effect]:
        return self.do(
            p.WorkerVersionFailed(worker=worker, version=version, lineage=self.lineage, reason="bad checksum")
        )

    def ask(self, step: int) -> list[p.Effect]:
        return self.do(p.BatchRequested(step=step))

    def tick(self, seconds: float) -> list[p.Effect]:
        self.now_s += seconds
        return self.do(p.Tick())

    def lease_of(self, group_id: int, sample_index: int = 0, purpose: str = "train") -> int:
        """The running lease of this sample."""
        (lease_id,) = [
            lease_id
            for lease_id, (_, order) in self.held.items()
            if (order.group_id, order.sample_index, order.purpose) == (group_id, sample_index, purpose)
        ]
        return lease_id

    def report(
        self,
        lease_id: int,
        *,
        group_id: int,
        sample_index: int = 0,
        worker: str = "w0",
        first: int = 0,
        last: int | None = None,
        kind: Any = "scored",
        value: float | None = 1.0,
    ) -> list[p.Effect]:
        return self.do(
            p.SampleReported(
                worker=worker,
                lease_id=lease_id,
                group_id=group_id,
                sample_index=sample_index,
                num_tokens=5,
                first_version=first,
                last_version=first if last is None else last,
                verdict_kind=kind,
                value=value if kind == "scored" else None,
            )
        )

    def finish(self, group_id: int, sample_index: int = 0, purpose: str = "train", **facts: Any) -> list[p.Effect]:
        lease_id = self.lease_of(group_id, sample_index, purpose)
        facts.setdefault("worker", self.held[lease_id][0])
        return self.report(lease_id, group_id=group_id, sample_index=sample_index, **facts)

    def progress(self, lease_id: int, start: int, versions: list[int], worker: str = "w0") -> list[p.Effect]:
        return self.do(p.ProgressReported(worker=worker, items=(part(lease_id, start, versions),)))

    def give_back(self, lease_id: int, start: int, versions: list[int], reason: str) -> list[p.Effect]:
        worker, _ = self.held.pop(lease_id)
        return self.do(p.LeaseReturned(worker=worker, part=part(lease_id, start, versions), reason=reason))


def part(lease_id: int, start: int, versions: list[int]) -> p.PartialReport:
    first, last = (versions[0], versions[-1]) if versions else (-1, -1)
    return p.PartialReport(
        lease_id=lease_id, start=start, num_tokens=len(versions), first_version=first, last_version=last
    )


def only(effects: list[p.Effect], kind: type[E]) -> E:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def has(effects: list[p.Effect], kind: type[p.Effect]) -> bool:
    return any(isinstance(effect, kind) for effect in effects)


def leased(effects: list[p.Effect]) -> list[p.LeaseOrder]:
    return [order for effect in effects if isinstance(effect, p.SendLeases) for order in effect.leases]


# ---------------------------------------------------------------- admission


def test_admission_stops_at_the_bound_and_goes_on_with_the_version_of_the_worker_that_takes_the_lease() -> None:
    desk = Desk(max_staleness=1)
    assert len(leased(desk.start(workers=("w0", "w1")))) == 4, "two steps' worth at version 0"
    for group_id in range(2):
        desk.finish(group_id)
    assert [group.group_id for group in only(desk.ask(1), p.SendBatch).groups] == [0, 1]
    assert leased(desk.publish(1)) == [], "no worker has version 1 yet"
    new = desk.load("w1", 1)
    assert {effect.worker for effect in new if isinstance(effect, p.SendLeases)} == {"w1"}
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
    assert len(only(first, p.SendLeases).leases) == 6
    for step in (1, 2, 3):
        for group_id in (2 * step - 2, 2 * step - 1):
            for index in range(3):
                desk.finish(group_id, index, first=step - 1)
        assert only(desk.ask(step), p.SendBatch).step == step
        desk.publish(step)
        desk.load("w0", step)
    assert desk.coordinator.counts().drawn == 6


def test_one_step_off_starts_a_batch_only_when_the_one_before_is_finished() -> None:
    desk = Desk(mode="one_step_off", max_staleness=None)
    assert {order.group_id for order in leased(desk.start())} == {0, 1}
    assert leased(desk.finish(1)) == []
    assert {order.group_id for order in leased(desk.finish(0))} == {2, 3}, "generated while batch 1 trains"
    assert only(desk.ask(1), p.SendBatch).step == 1
    desk.finish(2)
    assert leased(desk.finish(3)) == [], "not two batches ahead"


def test_unbounded_starts_no_more_than_the_run_needs() -> None:
    desk = Desk(max_staleness=None, num_steps=3)
    assert len(leased(desk.start())) == 6


def test_a_group_stays_on_one_worker_and_workers_share_the_load() -> None:
    desk = Desk(group_size=4, groups_per_step=4, max_staleness=0)
    effects = desk.start(workers=("w0", "w1"), capacity=16)
    assert len(leased(effects)) == 16
    by_group: dict[int, set[str]] = {}
    desk = Desk(group_size=4, groups_per_step=4, max_staleness=0)
    desk.do(p.RunStarted(lineage="l0"))
    desk.lineage = "l0"
    desk.join("w0", capacity=16)
    desk.join("w1", capacity=16)
    desk.load("w0", 0)
    desk.load("w1", 0)
    for effect in desk.publish(0):
        if isinstance(effect, p.SendLeases):
            for order in effect.leases:
                by_group.setdefault(order.group_id, set()).add(effect.worker)
    assert sorted(map(len, by_group.values())) == [1, 1, 1, 1]
    assert sorted(worker for workers in by_group.values() for worker in workers) == ["w0", "w0", "w1", "w1"]


# ---------------------------------------------------------------- consumption


def test_wait_holds_a_step_back_for_groups_that_must_go_several_steps_later() -> None:
    desk = Desk(groups_per_step=1, max_staleness=3)
    desk.start()  # groups 0 to 3 at version 0: deadline 4
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    desk.load("w0", 1)  # group 4: deadline 5
    desk.finish(4, first=1)
    assert not has(desk.ask(2), p.SendBatch), "groups 1, 2, 3 need steps 2, 3 and 4"
    assert "unfinished groups" in desk.coordinator.waits()[0]
    assert only(desk.finish(2), p.SendBatch).groups[0].group_id == 2, "earliest deadline first"


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
    assert not has(desk.ask(2), p.SendBatch)
    effects = desk.progress(desk.lease_of(1, 1), 0, [1])
    assert only(effects, p.SendBatch).groups[0].group_id == 2, "now group 1 is known to last until step 3"


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
    assert only(effects, p.SendBatch).groups[0].group_id == 2, "drop does not wait"
    assert only(effects, p.DropGroup) == p.DropGroup(
        group_id=1, reason="stale", detail="older than step 3 may use"
    )
    assert has(effects, p.SendCancel)
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
    assert has(desk.ask(2), p.SendBatch)
    desk.publish(2)
    desk.finish(1)
    assert only(desk.ask(3), p.SendBatch).groups[0].first_version == 0, "staleness 2 in spite of the bound"


def test_the_trainer_may_ask_one_step_ahead_and_ask_again() -> None:
    desk = Desk(max_staleness=2)
    desk.start()
    for group_id in range(4):
        desk.finish(group_id)
    first = only(desk.ask(1), p.SendBatch)
    assert only(desk.ask(2), p.SendBatch).step == 2
    again = desk.ask(1)
    assert only(again, p.SendBatch) == first
    assert not has(again, p.RecordBatch)
    assert only(desk.ask(9), p.Note).kind == "ignored"


def test_a_group_past_its_wall_clock_deadline_is_dropped_and_its_leases_cancelled() -> None:
    desk = Desk(max_staleness=0, group_timeout_s=10.0)
    desk.start()
    lease_id = desk.lease_of(0)
    assert not has(desk.tick(9.0), p.DropGroup)
    desk.finish(1)
    effects = desk.tick(2.0)
    assert only(effects, p.DropGroup).reason == "timeout"
    assert only(effects, p.SendCancel).lease_ids == (lease_id,)
    assert leased(effects)[0].group_id == 2
    assert has(desk.report(lease_id, group_id=0), p.SendAck), "the late answer is acknowledged and not used"


# ---------------------------------------------------------------- workers that come and go


def test_a_lost_workers_samples_go_on_elsewhere_from_their_reported_tokens() -> None:
    desk = Desk(max_staleness=4, groups_per_step=1, num_steps=1)
    desk.start(workers=("w0", "w1"))
    assert desk.held[desk.lease_of(0)][0] == "w0"
    lease_id = desk.lease_of(0)
    stored = desk.progress(lease_id, 0, [0, 0, 0])
    assert only(stored, p.StorePartial).num_tokens == 3
    assert only(desk.progress(lease_id, 1, [0, 0, 0]), p.StorePartial).skip == 2, "an overlap is cut off"
    assert not has(desk.progress(lease_id, 9, [0]), p.StorePartial), "a hole is not stored"
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
    assert only(late, p.StoreFinished).lease_id == old, "first come, first kept"
    assert only(late, p.SendCancel) == p.SendCancel(worker="w1", lease_ids=(new,))
    for lease_id, worker in ((old, "w0"), (new, "w1")):
        effects = desk.report(lease_id, group_id=0, worker=worker)
        assert not has(effects, p.StoreFinished)
        assert only(effects, p.SendAck).lease_ids == (lease_id,)


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
    assert not has(effects, p.StoreFinished)
    assert has(effects, p.SendAck)
    assert has(desk.report(new, group_id=0, worker="w1", first=1), p.StoreFinished)


def test_a_worker_that_comes_back_is_told_to_stop_what_others_took_over() -> None:
    desk = Desk(max_staleness=0)
    desk.start(workers=("w0", "w1"))
    held = sorted(i for i, (worker, _) in desk.held.items() if worker == "w0")
    desk.lose("w0")
    assert list(only(desk.join("w0"), p.SendCancel).lease_ids) == held


def test_a_new_process_of_the_same_name_starts_with_nothing_and_its_predecessors_death_is_old_news() -> None:
    desk = Desk(max_staleness=0)
    desk.start()
    effects = desk.join("w0", incarnation="b")
    assert only(effects, p.SendVersion).version == 0
    assert leased(effects) == []
    assert len(leased(desk.load("w0", 0))) == 2
    assert desk.do(p.WorkerLost(worker="w0", reason="killed", incarnation="a")) == []


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


def test_a_worker_that_cannot_load_is_quarantined_and_tried_again_while_others_go_on() -> None:
    desk = Desk(max_staleness=1, groups_per_step=1, load_retry_s=5.0, max_load_attempts=2)
    desk.start(workers=("w0", "w1"), capacity=1)
    desk.finish(0)
    desk.ask(1)
    desk.publish(1)
    assert only(desk.fail("w1", 1), p.Note).kind == "quarantined"
    assert any("w1 is quarantined" in line for line in desk.coordinator.waits())
    assert {w for e in desk.load("w0", 1) if isinstance(e, p.SendLeases) for w in [e.worker]} <= {"w0"}
    assert only(desk.tick(6.0), p.SendVersion).worker == "w1"
    desk.fail("w1", 1)
    assert not has(desk.tick(60.0), p.SendVersion), "bounded retries"
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
    assert only(effects, p.Note).kind == "refused"
    assert has(effects, p.SendAck)
    assert leased(effects)[0].group_id == 2, "sampled anew"


# ---------------------------------------------------------------- verdicts and filters


@pytest.mark.parametrize(
    ("on_failure", "fate"),
    [("drop_sample", "ready"), ("drop_group", "verdict_timed_out"), (0.5, "ready")],
)
def test_a_non_score_is_handled_as_configured(on_failure: Any, fate: str) -> None:
    desk = Desk(group_size=3, groups_per_step=1, max_staleness=0, on_failure=on_failure)
    desk.start()
    desk.finish(0, 0, value=1.0)
    stored = only(desk.finish(0, 1, kind="timed_out"), p.StoreFinished)
    if fate != "ready":
        assert desk.coordinator.counts().dropped == {fate: 1}
        return
    desk.finish(0, 2, value=0.0)
    kept = only(desk.ask(1), p.SendBatch).groups[0].sample_indices
    assert kept == ((0, 2) if on_failure == "drop_sample" else (0, 1, 2))
    assert stored.value == (None if on_failure == "drop_sample" else 0.5), "errors are not zeros"


def test_a_group_with_fewer_than_two_scores_is_dropped_but_a_group_of_one_needs_only_one() -> None:
    desk = Desk(group_size=2, groups_per_step=1, max_staleness=0)
    desk.start()
    desk.finish(0, 0)
    desk.finish(0, 1, kind="crashed")
    assert desk.coordinator.counts().dropped == {"too_few_scores": 1}
    desk = Desk(group_size=1, groups_per_step=1, max_staleness=0)
    desk.start()
    desk.finish(0)
    assert desk.coordinator.counts().ready == 1


def test_a_group_without_signal_is_filtered_and_its_place_is_free_even_at_bound_zero() -> None:
    desk = Desk(group_size=2, groups_per_step=1, max_staleness=0, filter_zero_signal=True)
    desk.start()
    desk.finish(0, 0)
    effects = desk.finish(0, 1)
    assert only(effects, p.FilterGroup).value == 1.0
    assert {order.group_id for order in leased(effects)} == {1}
    desk.finish(1, 0)
    desk.finish(1, 1, value=0.0)
    assert has(desk.ask(1), p.SendBatch)


def test_many_filtered_batches_in_a_row_end_the_run_with_advice() -> None:
    desk = Desk(group_size=2, groups_per_step=1, max_staleness=0, filter_zero_signal=True, max_filtered_batches=3)
    desk.start()
    for group_id in range(3):
        desk.finish(group_id, 0)
        desk.finish(group_id, 1)
    end = only(desk.effects, p.EndRun)
    assert end.status == "failed"
    assert "3 filtered" in end.reason
    assert "easier or harder prompts" in end.reason


def test_a_run_whose_first_prompts_are_all_rejected_ends_with_the_reason() -> None:
    desk = Desk(groups_per_step=2, max_staleness=0)
    desk.start()
    for _ in range(2):
        desk.give_back(next(iter(desk.held)), 0, [], "rejected: prompt has 900 tokens, the context holds 128")
    assert "prompt has 900 tokens" in only(desk.effects, p.EndRun).reason
    assert desk.coordinator.counts().dropped == {"rejected": 2}


# ---------------------------------------------------------------- the end


def finish_all(desk: Desk, num_steps: int, groups_per_step: int = 1) -> None:
    for step in range(1, num_steps + 1):
        for group_id in range((step - 1) * groups_per_step, step * groups_per_step):
            desk.finish(group_id, first=step - 1)
        desk.ask(step)
        desk.publish(step)
        desk.load("w0", step)


def test_a_completed_run_waits_for_the_checkpoint() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0, num_steps=2)
    desk.start()
    finish_all(desk, 2)
    assert only(desk.effects, p.SendNoMoreBatches).last_step == 2
    assert not has(desk.effects, p.EndRun)
    assert "checkpoint" in desk.coordinator.waits()[0]
    end = desk.do(p.CheckpointTaken(version=2, path="c2"))
    assert only(end, p.EndRun).status == "completed"
    assert desk.coordinator.is_over


def test_a_stop_finishes_the_running_step_and_saves() -> None:
    desk = Desk(groups_per_step=1, max_staleness=2)
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    desk.ask(2)  # prefetched
    assert only(desk.do(p.StopRequested()), p.SendNoMoreBatches).last_step == 1
    assert leased(desk.publish(1)) == []
    assert only(desk.do(p.CheckpointTaken(version=1, path="c1")), p.EndRun).status == "stopped"


def test_a_stop_before_anything_was_published_ends_at_once() -> None:
    desk = Desk()
    desk.do(p.RunStarted(lineage="l0"))
    assert only(desk.do(p.StopRequested()), p.EndRun).status == "stopped"


def test_data_that_runs_out_ends_the_run_in_good_order() -> None:
    desk = Desk(groups_per_step=2, max_staleness=4, max_draws=3)
    desk.start()
    for group_id in range(3):
        desk.finish(group_id)
    desk.ask(1)
    desk.publish(1)
    end = only(desk.ask(2), p.SendNoMoreBatches)
    assert "data is used up" in end.reason
    assert only(desk.do(p.CheckpointTaken(version=1, path="c")), p.EndRun).status == "exhausted"
    assert desk.coordinator.counts().in_flight == 1


def test_a_run_without_workers_left_ends_with_a_reason() -> None:
    desk = Desk(num_workers=1)
    desk.start()
    desk.ask(1)
    desk.lose("w0")
    assert not has(desk.effects, p.EndRun), "a restart may come"
    desk.lose("w0", is_permanent=True)
    end = only(desk.effects, p.EndRun)
    assert end.status == "failed"
    assert "w0: gone" in end.reason


def test_a_lost_trainer_ends_the_run_as_failed() -> None:
    desk = Desk()
    desk.start()
    assert only(desk.do(p.TrainerLost(reason="killed")), p.EndRun).status == "failed"
    late = desk.report(desk.lease_of(0), group_id=0)
    assert has(late, p.StoreFinished), "what still arrives is kept for the resume"
    assert has(late, p.SendAck)


def test_payloads_are_purged_only_when_the_oldest_kept_checkpoint_covers_them() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0, keep_checkpoints=2)
    desk.start()
    finish_all(desk, 3)
    covered = [
        only(desk.do(p.CheckpointTaken(version=v, path=f"c{v}")), p.PurgePayloads).covered_step for v in (1, 2, 3)
    ]
    assert covered == [0, 1, 2]


# ---------------------------------------------------------------- resume


def state_of(**facts: Any) -> p.LedgerState:
    empty: dict[str, Any] = {
        "num_lives": 1, "num_drawn": 0, "num_filtered": 0, "dropped": {}, "live": (), "batches": (),
        "checkpoints": (), "evals": (),
    }  # fmt: skip
    return p.LedgerState(**{**empty, **facts})


def batch_of(step: int, *group_ids: int) -> p.BatchRecord:
    groups = tuple(p.BatchGroup(group_id=i, sample_indices=(0,), first_version=0) for i in group_ids)
    return p.BatchRecord(step=step, lineage="l0", groups=groups)


def sample(index: int, first: int, last: int, num_tokens: int = 4, **facts: Any) -> p.SampleRecord:
    return p.SampleRecord(
        sample_index=index, num_tokens=num_tokens, first_version=first, last_version=last, **facts
    )


def test_a_resume_replays_recorded_batches_in_order_under_a_new_lineage() -> None:
    state = state_of(num_drawn=4, batches=(batch_of(1, 0), batch_of(2, 2), batch_of(3, 1)), live=(
        p.GroupRecord(group_id=3, version=2, samples=(sample(0, 2, 3),)),
    ))  # fmt: skip
    settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9, max_staleness=2)
    desk = Desk(Coordinator.restore(settings, state))
    effects = desk.start(checkpoint=1)
    assert only(effects, p.RecordLineage).lineage == "l1"
    assert leased(effects) == [], "started counts the replayed steps, and group 3 goes on from version 3 only"
    for step, group_id in ((2, 2), (3, 1)):
        effects = desk.ask(step)
        batch = only(effects, p.SendBatch)
        assert (batch.groups[0].group_id, batch.is_replay, batch.lineage) == (group_id, True, "l1")
        assert only(effects, p.RecordBatch).is_replay
        desk.publish(step)
        orders = leased(desk.load("w0", step))
    assert [(order.group_id, order.min_version, order.prefix_tokens) for order in orders if order.group_id == 3] == [
        (3, 3, 4)
    ]
    assert min(order.lease_id for order in orders) > 2**32, "lease ids of earlier lives are not given again"
    assert not has(desk.ask(4), p.SendBatch)
    final = only(desk.finish(3, first=2, last=3), p.SendBatch)
    assert (final.step, final.is_replay) == (4, False)


def test_a_restored_coordinator_counts_what_the_ledger_counted() -> None:
    state = state_of(
        num_drawn=6, num_filtered=1, dropped={"stale": 1}, batches=(batch_of(1, 0, 1),),
        live=(
            p.GroupRecord(group_id=4, version=0, samples=(sample(0, 0, 0, is_finished=True, is_kept=True, value=1.0),)),
            p.GroupRecord(group_id=5, version=0, samples=()),
        ),
    )  # fmt: skip
    coordinator = Coordinator.restore(CoordinatorSettings(groups_per_step=2, group_size=1, num_steps=9), state)
    counts = coordinator.counts()
    assert (counts.drawn, counts.consumed, counts.filtered, counts.running, counts.ready) == (6, 2, 1, 1, 1)
    assert counts.add_up()


def test_a_tightened_bound_drops_what_can_no_longer_be_used_instead_of_waiting_for_ever() -> None:
    live = tuple(p.GroupRecord(group_id=i, version=0, samples=()) for i in range(1, 6))
    state = state_of(num_drawn=6, batches=(batch_of(1, 0),), live=live)
    settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9, max_staleness=2)
    desk = Desk(Coordinator.restore(settings, state))
    desk.start(checkpoint=1)
    assert desk.coordinator.counts().dropped == {"surplus": 3}


def test_contradictions_with_the_record_are_the_users_mistake() -> None:
    state = state_of(num_drawn=2, batches=(batch_of(1, 0, 1),))
    with pytest.raises(UserError, match="groups_per_step"):
        Coordinator.restore(CoordinatorSettings(groups_per_step=3, group_size=1, num_steps=9), state)
    coordinator = Coordinator.restore(CoordinatorSettings(groups_per_step=2, group_size=1, num_steps=9), state)
    with pytest.raises(UserError, match="checkpoint 5 is newer"):
        coordinator.handle(p.RunStarted(lineage="l1", checkpoint_version=5), 0.0)


# ---------------------------------------------------------------- evaluation


def test_the_baseline_uses_all_workers_and_training_goes_on_beside_it() -> None:
    desk = Desk(num_eval_rows=6, max_staleness=0, groups_per_step=8)
    orders = leased(desk.start(workers=("w0", "w1"), capacity=4))
    assert sum(order.purpose == "eval" for order in orders) == 4, "half of each worker's credits"
    assert sum(order.purpose == "train" for order in orders) == 4
    workers = {effect.worker for effect in desk.effects if isinstance(effect, p.SendLeases)}
    assert workers == {"w0", "w1"}


def test_a_periodic_evaluation_pins_one_worker_which_hears_of_newer_versions_only_afterwards() -> None:
    desk = Desk(num_eval_rows=2, num_periodic_eval_rows=1, eval_at_start=False, eval_every_steps=1, max_staleness=3,
                groups_per_step=1)  # fmt: skip
    desk.start(workers=("w0", "w1"))
    for group_id in range(2):
        desk.finish(group_id)
        desk.ask(group_id + 1)
    desk.publish(1)
    orders = leased(desk.load("w1", 1))
    assert [order.group_id for order in orders if order.purpose == "eval"] == [0], "the worker with most room"
    announced = [e.worker for e in desk.publish(2) if isinstance(e, p.SendVersion)]
    assert announced == ["w0"], "w1 is pinned to version 1"
    effects = desk.finish(0, purpose="eval", first=1, value=0.25)
    assert only(effects, p.EvalDone) == p.EvalDone(version=1, requested_version=1, kind="periodic", values=(0.25,))
    assert only(effects, p.RecordEval).is_ledger
    assert only(effects, p.SendVersion).worker == "w1"


def test_eval_rows_of_a_lost_worker_start_from_scratch_at_the_pinned_version() -> None:
    desk = Desk(num_eval_rows=1, max_staleness=0, groups_per_step=1)
    desk.start()
    desk.progress(desk.lease_of(0, purpose="eval"), 0, [0, 0])
    desk.lose("w0")
    desk.join("w0", incarnation="b")
    (order,) = [order for order in leased(desk.load("w0", 0)) if order.purpose == "eval"]
    assert (order.prefix_tokens, order.min_version) == (0, 0)


def test_an_eval_answer_that_mixes_versions_does_not_count_and_a_failed_score_is_not_zero() -> None:
    desk = Desk(num_eval_rows=1, max_staleness=4, groups_per_step=1)
    desk.start()
    refused = desk.finish(0, purpose="eval", first=0, last=1)
    assert not has(refused, p.EvalDone)
    assert only(desk.finish(0, purpose="eval", kind="crashed"), p.EvalDone).values == (None,)


def test_an_evaluation_whose_version_is_gone_is_pinned_to_the_newest_or_dropped() -> None:
    desk = Desk(num_eval_rows=1, eval_at_start=False, eval_every_steps=1, max_staleness=3, groups_per_step=1)
    desk.start()
    for group_id in range(2):
        desk.finish(group_id)
        desk.ask(group_id + 1)
    desk.publish(1)
    desk.publish(2)
    effects = desk.fail("w0", 1)
    assert only(effects, p.EvalDropped).version == 1, "version 2 has its own evaluation"
    assert only(effects, p.SendVersion).version == 2
    desk.load("w0", 2)
    assert only(desk.finish(0, purpose="eval", first=2), p.EvalDone).version == 2


def test_the_final_evaluation_ends_the_run_and_a_hopeless_one_does_not_hang_it() -> None:
    for is_hopeless in (False, True):
        desk = Desk(groups_per_step=1, max_staleness=0, num_steps=1, num_eval_rows=2, eval_at_start=False)
        desk.start()
        desk.finish(0)
        desk.ask(1)
        desk.publish(1)
        desk.do(p.CheckpointTaken(version=1, path="c1"))
        desk.load("w0", 1)
        assert not has(desk.effects, p.EndRun)
        if is_hopeless:
            desk.lose("w0", is_permanent=True)
            assert has(desk.effects, p.EvalDropped)
        else:
            for row in range(2):
                desk.finish(row, purpose="eval", first=1)
            assert only(desk.effects, p.EvalDone).kind == "final"
        assert only(desk.effects, p.EndRun).status == "completed"


def test_an_evaluation_job_of_no_steps_scores_the_published_version() -> None:
    desk = Desk(groups_per_step=1, num_steps=0, num_eval_rows=2)
    desk.start()
    for row in range(2):
        desk.finish(row, purpose="eval")
    assert only(desk.effects, p.EvalDone).values == (1.0, 1.0)
    assert only(desk.effects, p.EndRun).status == "completed"


# ---------------------------------------------------------------- words and numbers


def test_waits_say_who_holds_the_batch_up_and_progress_rises_only_with_useful_work() -> None:
    desk = Desk(max_staleness=0, num_workers=2)
    desk.do(p.RunStarted(lineage="l0"))
    assert "starting version" in desk.coordinator.waits()[0]
    desk = Desk(max_staleness=0, num_workers=2)
    desk.start()
    desk.ask(1)
    desk.finish(0)
    waits = desk.coordinator.waits()
    assert waits[0] == "trainer waits for batch 1: 1 of 2 groups ready; w0 holds 1 samples"
    assert "1 rollout worker(s) to say hello" in waits[1]
    before = desk.coordinator.progress
    desk.tick(1.0)
    desk.report(1, group_id=0)
    assert desk.coordinator.progress == before
    desk.finish(1)
    assert desk.coordinator.progress > before
