"""The coordinator, scenario by scenario: resume, evaluation, words for the watchdog."""

from __future__ import annotations

import pytest
from desk import Desk, batch_of, has, leased, only, sample, state_of

from areal_like.errors import UserError
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import (
    Effect,
    EndRun,
    EvalDone,
    EvalDropped,
    Note,
    RecordBatch,
    RecordEval,
    RecordLineage,
    SendBatch,
    SendLeases,
    SendNoMoreBatches,
    SendVersion,
    StoreFinished,
)
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    EarlyStopReached,
    Published,
    RunStarted,
    StopRequested,
    TrainerRestarted,
    WorkerVersionLoaded,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import GroupRecord

# ---------------------------------------------------------------- resume


def test_a_resume_replays_recorded_batches_in_order_under_a_new_lineage() -> None:
    state = state_of(num_drawn=4, batches=(batch_of(1, 0), batch_of(2, 2), batch_of(3, 1)), live=(
        GroupRecord(group_id=3, version=2, samples=(sample(0, 2, 3),)),
    ))  # fmt: skip
    settings = CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9, max_staleness=2)
    desk = Desk(Coordinator.restore(settings, state))
    effects = desk.start(checkpoint=1)
    assert only(effects, RecordLineage).lineage == "l1"
    assert leased(effects) == [], "started counts the replayed steps, and group 3 goes on from version 3 only"
    for step, group_id in ((2, 2), (3, 1)):
        effects = desk.ask(step)
        batch = only(effects, SendBatch)
        assert (batch.groups[0].group_id, batch.is_replay, batch.lineage) == (group_id, True, "l1")
        assert only(effects, RecordBatch).is_replay
        desk.publish(step)
        orders = leased(desk.load("w0", step))
    assert [(order.group_id, order.min_version, order.prefix_tokens) for order in orders if order.group_id == 3] == [
        (3, 3, 4)
    ]
    assert min(order.lease_id for order in orders) > 2**32, "lease ids of earlier lives are not given again"
    assert not has(desk.ask(4), SendBatch)
    final = only(desk.finish(3, first=2, last=3), SendBatch)
    assert (final.step, final.is_replay) == (4, False)


def restarted(desk: Desk, *steps: int, base: int, lineage: str = "l1") -> list[Effect]:
    """The trainer dies and goes back to `base`; `steps` were recorded after it, one group each, numbered as they."""
    desk.lineage = lineage
    batches = tuple(batch_of(step, step - 1) for step in steps)
    return desk.do(
        TrainerRestarted(reason="trainer: killed", lineage=lineage, checkpoint_version=base, batches=batches)
    )


def played(*, steps: int, checkpoint: int) -> Desk:
    """A run of one group a step, `steps` trained on, the checkpoint of `checkpoint` reported; w0 has the newest."""
    desk = Desk(groups_per_step=1, max_staleness=2)
    desk.start()
    for step in range(1, steps + 1):
        desk.ask(step)
        desk.finish(step - 1, first=step - 1)
        desk.publish(step)
        desk.load("w0", step)
        if step == checkpoint:
            desk.do(CheckpointTaken(version=step, path=f"c{step}"))
    return desk


def test_a_trainer_that_restarts_replays_in_order_while_samples_go_on() -> None:
    desk = played(steps=4, checkpoint=2)
    effects = restarted(desk, 3, 4, base=2)
    lineage = only(effects, RecordLineage)
    assert (lineage.lineage, lineage.checkpoint_version, lineage.trainer_died) == ("l1", 2, "trainer: killed")
    assert "2 recorded batches are replayed" in only(effects, Note).text
    assert "the trainer restarts from version 2" in desk.coordinator.waits()[0]
    assert has(desk.finish(4, first=4), StoreFinished), "rollout has not stood still"
    assert not has(desk.publish(2), SendVersion), "workers are at version 4 and stay there"
    for step in (3, 4):
        batch = only(desk.ask(step), SendBatch)
        assert (batch.step, batch.groups[0].group_id, batch.is_replay, batch.lineage) == (step, step - 1, True, "l1")
        assert f"replays step {step} of 4" in desk.coordinator.waits()[0]
        assert not has(desk.publish(step), SendVersion)
    batch = only(desk.ask(5), SendBatch)
    assert (batch.groups[0].group_id, batch.is_replay) == (4, False)
    assert only(desk.publish(5), SendVersion).lineage == "l1"
    assert desk.coordinator.counts().consumed == 5


@pytest.mark.parametrize("base", [1, 2])
def test_a_run_that_is_stopping_ends_with_the_checkpoint_of_a_trainer_that_died(base: int) -> None:
    """The running step died with it, and to replay steps for the sake of one that is not trained would take a while."""
    desk = played(steps=2, checkpoint=base)
    desk.ask(3)
    desk.finish(2, first=2)
    assert only(desk.do(StopRequested()), SendNoMoreBatches).last_step == 3
    effects = restarted(desk, *range(base + 1, 4), base=base)
    assert only(effects, EndRun).status == "stopped"
    assert desk.coordinator.is_over


def test_a_run_that_goes_on_after_its_trainer_died_ends_with_its_last_step_all_the_same() -> None:
    desk = played(steps=2, checkpoint=1)
    restarted(desk, 2, base=1)
    desk.publish(1)
    desk.ask(2)
    desk.publish(2)
    desk.ask(3)
    desk.finish(2, first=2)
    assert only(desk.do(StopRequested()), SendNoMoreBatches).last_step == 3
    assert not has(desk.publish(3), EndRun)
    assert only(desk.do(CheckpointTaken(version=3, path="c3")), EndRun).status == "stopped"


def test_an_early_stop_uses_what_is_recorded_saves_it_and_is_a_completed_run() -> None:
    desk = played(steps=2, checkpoint=1)
    desk.finish(2, first=2)
    effects = desk.do(EarlyStopReached(reason="early stop: enough"))
    assert not has(effects, EndRun)
    assert only(effects, SendNoMoreBatches).last_step == 2
    end = only(desk.do(CheckpointTaken(version=2, path="c2")), EndRun)
    assert (end.status, end.reason) == ("completed", "early stop: enough")


def test_a_worker_that_joins_during_a_replay_gets_the_version_when_it_is_there_again() -> None:
    desk = played(steps=3, checkpoint=2)
    restarted(desk, 3, base=2)
    assert not has(desk.join("w1"), SendVersion), "what the dead trainer published may be gone"
    desk.publish(2)
    desk.ask(3)
    sent = only(desk.publish(3), SendVersion)
    assert (sent.worker, sent.version, sent.lineage) == ("w1", 3, "l1")
    assert not has(desk.load("w1", 3), Note), "which would say that it is ignored"


def test_a_worker_that_was_still_loading_may_say_so_by_the_old_lineage_or_is_reported_again() -> None:
    desk = played(steps=3, checkpoint=2)
    desk.join("w1")
    restarted(desk, 3, base=2)
    late = desk.do(WorkerVersionLoaded(worker="w1", version=3, lineage="l0"))
    assert not has(late, Note), "the bits it has are those of version 3"
    desk.join("w2")
    desk.publish(2)
    desk.ask(3)
    assert [effect.worker for effect in desk.publish(3) if isinstance(effect, SendVersion)] == ["w2"]


def test_the_words_of_a_dead_trainer_change_nothing() -> None:
    desk = played(steps=3, checkpoint=2)
    restarted(desk, 3, base=2)
    for event in (
        Published(version=4, lineage="l0", manifest_path="v4"),
        CheckpointTaken(version=3, path="c3"),
        BatchRequested(step=5),
    ):
        effects = desk.do(event)
        assert [effect for effect in effects if not isinstance(effect, Note)] == []
    desk.publish(2)
    assert only(desk.ask(3), SendBatch).is_replay


def test_a_stop_while_the_trainer_is_dead_ends_with_its_checkpoint() -> None:
    desk = played(steps=3, checkpoint=2)
    restarted(desk, 3, base=2)
    end = only(desk.do(StopRequested(reason="enough")), EndRun)
    assert (end.status, end.reason) == ("stopped", "enough")


def test_a_trainer_that_dies_after_its_last_step_makes_it_again_and_saves() -> None:
    desk = Desk(groups_per_step=1, max_staleness=2, num_steps=2)
    desk.start()
    for step in (1, 2):
        desk.ask(step)
        desk.finish(step - 1, first=step - 1)
        desk.publish(step)
        desk.load("w0", step)
    assert not has(desk.effects, EndRun)
    restarted(desk, 1, 2, base=0)
    desk.publish(0)
    for step in (1, 2):
        assert only(desk.ask(step), SendBatch).is_replay
        desk.publish(step)
    assert only(desk.ask(3), SendNoMoreBatches).last_step == 2
    assert only(desk.do(CheckpointTaken(version=2, path="c2")), EndRun).status == "completed"


def test_a_restored_coordinator_counts_what_the_ledger_counted() -> None:
    state = state_of(
        num_drawn=6, num_filtered=1, dropped={"stale": 1}, batches=(batch_of(1, 0, 1),),
        live=(
            GroupRecord(group_id=4, version=0, samples=(sample(0, 0, 0, is_finished=True, is_kept=True, value=1.0),)),
            GroupRecord(group_id=5, version=0, samples=()),
        ),
    )  # fmt: skip
    coordinator = Coordinator.restore(CoordinatorSettings(groups_per_step=2, group_size=1, num_steps=9), state)
    counts = coordinator.counts()
    assert (counts.drawn, counts.consumed, counts.filtered, counts.running, counts.ready) == (6, 2, 1, 1, 1)
    assert counts.add_up()


def test_a_tightened_bound_drops_what_can_no_longer_be_used_instead_of_waiting_indefinitely() -> None:
    live = tuple(GroupRecord(group_id=i, version=0, samples=()) for i in range(1, 6))
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
        coordinator.handle(RunStarted(lineage="l1", checkpoint_version=5), 0.0)


# ---------------------------------------------------------------- evaluation


def test_the_baseline_uses_all_workers_and_training_goes_on_meanwhile() -> None:
    desk = Desk(num_eval_rows=6, max_staleness=0, groups_per_step=8)
    orders = leased(desk.start(workers=("w0", "w1"), capacity=4))
    assert sum(order.purpose == "eval" for order in orders) == 4, "half of each worker's credits"
    assert sum(order.purpose == "train" for order in orders) == 4
    workers = {effect.worker for effect in desk.effects if isinstance(effect, SendLeases)}
    assert workers == {"w0", "w1"}


def test_a_periodic_evaluation_pins_one_worker_which_hears_of_newer_versions_only_afterwards() -> None:
    desk = Desk(num_eval_rows=2, num_periodic_eval_rows=1, eval_at_start=False, eval_every_steps=1, max_staleness=3,
                groups_per_step=1)  # fmt: skip
    desk.start(workers=("w0", "w1"))
    for group_id in range(2):
        desk.finish(group_id)
        desk.ask(group_id + 1)
    desk.publish(1)
    orders = leased(desk.load("w0", 1) + desk.load("w1", 1))
    assert [order.group_id for order in orders if order.purpose == "eval"] == [0]
    pinned, _ = desk.held[desk.lease_of(0, purpose="eval")]
    announced = [e.worker for e in desk.publish(2) if isinstance(e, SendVersion)]
    assert announced == [{"w0": "w1", "w1": "w0"}[pinned]], "the other one is pinned to version 1"
    effects = desk.finish(0, purpose="eval", first=1, value=0.25)
    assert only(effects, EvalDone) == EvalDone(version=1, requested_version=1, kind="periodic", values=(0.25,))
    assert only(effects, RecordEval).is_ledger
    assert only(effects, SendVersion).worker == pinned


def test_at_most_two_periodic_evaluations_wait_and_the_oldest_is_dropped() -> None:
    """The only worker stays with the evaluation of version 1 while the steps go on."""
    desk = Desk(num_eval_rows=1, eval_at_start=False, eval_every_steps=1, max_staleness=9, groups_per_step=1)
    desk.start(workers=("w0", "w1"))
    for group_id in range(6):
        desk.finish(group_id)
        desk.ask(group_id + 1)
    desk.lose("w1")
    dropped = []
    for version in range(1, 6):
        effects = desk.publish(version) + (desk.load("w0", 1) if version == 1 else [])
        dropped += [
            (effect.version, "falling behind" in effect.reason) for effect in effects if isinstance(effect, EvalDropped)
        ]
        waiting = [job for job in desk.coordinator._state.evaluations.jobs if not job.workers]
        assert len(waiting) <= 2
    assert dropped == [(2, True), (3, True)]
    assert [job.requested_version for job in desk.coordinator._state.evaluations.jobs] == [1, 4, 5]


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
    assert not has(refused, EvalDone)
    assert only(desk.finish(0, purpose="eval", kind="crashed"), EvalDone).values == (None,)


def test_an_evaluation_whose_version_is_gone_is_pinned_to_the_newest_or_dropped() -> None:
    desk = Desk(num_eval_rows=1, eval_at_start=False, eval_every_steps=1, max_staleness=3, groups_per_step=1)
    desk.start()
    for group_id in range(2):
        desk.finish(group_id)
        desk.ask(group_id + 1)
    desk.publish(1)
    desk.publish(2)
    effects = desk.fail("w0", 1)
    assert only(effects, EvalDropped).version == 1, "version 2 has its own evaluation"
    assert only(effects, SendVersion).version == 2
    desk.load("w0", 2)
    assert only(desk.finish(0, purpose="eval", first=2), EvalDone).version == 2


def test_the_final_evaluation_ends_the_run_and_a_hopeless_one_does_not_hang_it() -> None:
    for is_hopeless in (False, True):
        desk = Desk(groups_per_step=1, max_staleness=0, num_steps=1, num_eval_rows=2, eval_at_start=False)
        desk.start()
        desk.finish(0)
        desk.ask(1)
        desk.publish(1)
        desk.do(CheckpointTaken(version=1, path="c1"))
        desk.load("w0", 1)
        assert not has(desk.effects, EndRun)
        if is_hopeless:
            desk.lose("w0", is_permanent=True)
            assert has(desk.effects, EvalDropped)
        else:
            for row in range(2):
                desk.finish(row, purpose="eval", first=1)
            assert only(desk.effects, EvalDone).kind == "final"
        assert only(desk.effects, EndRun).status == "completed"


def test_an_evaluation_job_of_no_steps_scores_the_published_version() -> None:
    desk = Desk(groups_per_step=1, num_steps=0, num_eval_rows=2)
    desk.start()
    for row in range(2):
        desk.finish(row, purpose="eval")
    assert only(desk.effects, EvalDone).values == (1.0, 1.0)
    assert only(desk.effects, EndRun).status == "completed"


# ---------------------------------------------------------------- words and numbers


def test_waits_say_who_holds_the_batch_up_and_progress_rises_only_with_useful_work() -> None:
    desk = Desk(max_staleness=0, num_workers=2)
    desk.do(RunStarted(lineage="l0"))
    assert "starting version" in desk.coordinator.waits()[0]
    desk = Desk(max_staleness=0, num_workers=2)
    desk.start()
    desk.ask(1)
    desk.finish(0)
    waits = desk.coordinator.waits()
    assert waits[0] == "trainer waits for batch 1: 1 of 2 groups ready; w0 holds 1 samples"
    assert "1 rollout worker(s) to register" in waits[1]
    before = desk.coordinator.progress
    desk.tick(1.0)
    desk.report(1, group_id=0)
    assert desk.coordinator.progress == before
    desk.finish(1)
    assert desk.coordinator.progress > before
