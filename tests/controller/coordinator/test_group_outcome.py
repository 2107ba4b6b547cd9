"""The coordinator, scenario by scenario: verdicts, filters, how a run ends."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, has, leased, only

from controller.coordinator.effects import (
    EndRun,
    FilterGroup,
    PurgePayloads,
    SendAck,
    SendBatch,
    SendNoMoreBatches,
    StoreFinished,
)
from controller.coordinator.events import CheckpointTaken, RunStarted, StopRequested, TrainerLost

# ---------------------------------------------------------------- verdicts and filters


@pytest.mark.parametrize(
    ("on_failure", "fate"),
    [("drop_sample", "ready"), ("drop_group", "verdict_timed_out"), (0.5, "ready")],
)
def test_a_non_score_is_handled_as_configured(on_failure: Any, fate: str) -> None:
    desk = Desk(group_size=3, groups_per_step=1, max_staleness=0, on_failure=on_failure)
    desk.start()
    desk.finish(0, 0, value=1.0)
    stored = only(desk.finish(0, 1, kind="timed_out"), StoreFinished)
    if fate != "ready":
        assert desk.coordinator.counts().dropped == {fate: 1}
        return
    desk.finish(0, 2, value=0.0)
    kept = only(desk.ask(1), SendBatch).groups[0].sample_indices
    assert kept == ((0, 2) if on_failure == "drop_sample" else (0, 1, 2))
    assert stored.value == (None if on_failure == "drop_sample" else 0.5), "errors are not zeros"


@pytest.mark.parametrize("on_failure", ["drop_sample", "drop_group", 0.5])
def test_a_refused_answer_is_left_out_of_its_group_whatever_is_configured_for_failures(on_failure: Any) -> None:
    desk = Desk(group_size=3, groups_per_step=1, max_staleness=0, on_failure=on_failure)
    desk.start()
    desk.finish(0, 0, value=1.0)
    refused = only(desk.finish(0, 1, kind="refused"), StoreFinished)
    assert (refused.value, refused.is_kept, refused.policy) == (None, False, "drop_sample")
    desk.finish(0, 2, value=0.0)
    assert only(desk.ask(1), SendBatch).groups[0].sample_indices == (0, 2)


def test_the_policy_is_that_of_the_scorer_that_failed_and_the_ledger_is_reported() -> None:
    desk = Desk(
        group_size=4, groups_per_step=1, max_staleness=0, on_failure="drop_sample",
        on_failure_of={"judge": 0.25, "code": "drop_group"},
    )  # fmt: skip
    desk.start()
    scored = only(desk.finish(0, 0, value=1.0), StoreFinished)
    judged = only(desk.finish(0, 1, kind="crashed", failed_in="judge"), StoreFinished)
    other = only(desk.finish(0, 2, kind="crashed", failed_in="math"), StoreFinished)
    assert [(one.policy, one.value, one.is_kept) for one in (scored, judged, other)] == [
        ("", 1.0, True), ("value", 0.25, True), ("drop_sample", None, False),
    ]  # fmt: skip
    coded = only(desk.finish(0, 3, kind="timed_out", failed_in="code"), StoreFinished)
    assert (coded.policy, coded.is_kept) == ("drop_group", False)
    assert desk.coordinator.counts().dropped == {"verdict_timed_out": 1}


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
    assert only(effects, FilterGroup).value == 1.0
    assert {order.group_id for order in leased(effects)} == {1}
    desk.finish(1, 0)
    desk.finish(1, 1, value=0.0)
    assert has(desk.ask(1), SendBatch)


def test_many_filtered_batches_in_a_row_end_the_run_with_advice() -> None:
    desk = Desk(group_size=2, groups_per_step=1, max_staleness=0, filter_zero_signal=True, max_filtered_batches=3)
    desk.start()
    for group_id in range(3):
        desk.finish(group_id, 0)
        desk.finish(group_id, 1)
    end = only(desk.effects, EndRun)
    assert end.status == "failed"
    assert "3 filtered" in end.reason
    assert "easier or harder prompts" in end.reason


def test_a_run_whose_first_prompts_are_all_rejected_ends_with_the_reason() -> None:
    desk = Desk(groups_per_step=2, max_staleness=0)
    desk.start()
    for _ in range(2):
        desk.give_back(next(iter(desk.held)), 0, [], "rejected", "prompt has 900 tokens, the context holds 128")
    assert "prompt has 900 tokens" in only(desk.effects, EndRun).reason
    assert desk.coordinator.counts().dropped == {"rejected": 2}


def test_refused_prompts_end_no_run_before_a_group_is_kept_and_only_too_many_in_a_row_do() -> None:
    desk = Desk(groups_per_step=2, max_staleness=0, max_filtered_batches=2)
    desk.start()
    for _ in range(3):
        assert not has(desk.give_back(next(iter(desk.held)), 0, [], "refused", "the stage words refuses it"), EndRun)
    desk.give_back(next(iter(desk.held)), 0, [], "refused", "the stage words refuses it")
    reason = only(desk.effects, EndRun).reason
    assert "most were refused (4): safety stages refuse prompts or answers" in reason
    assert reason.endswith("the last reason: the stage words refuses it")
    assert desk.coordinator.counts().dropped == {"refused": 4}


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
    assert only(desk.effects, SendNoMoreBatches).last_step == 2
    assert not has(desk.effects, EndRun)
    assert "checkpoint" in desk.coordinator.waits()[0]
    end = desk.do(CheckpointTaken(version=2, path="c2"))
    assert only(end, EndRun).status == "completed"
    assert desk.coordinator.is_over


def test_a_stop_finishes_the_running_step_and_saves() -> None:
    desk = Desk(groups_per_step=1, max_staleness=2)
    desk.start()
    desk.finish(0)
    desk.finish(1)
    desk.ask(1)
    desk.ask(2)  # prefetched
    assert only(desk.do(StopRequested()), SendNoMoreBatches).last_step == 1
    assert leased(desk.publish(1)) == []
    assert only(desk.do(CheckpointTaken(version=1, path="c1")), EndRun).status == "stopped"


def test_a_stop_before_anything_was_published_ends_at_once() -> None:
    desk = Desk()
    desk.do(RunStarted(lineage="l0"))
    assert only(desk.do(StopRequested()), EndRun).status == "stopped"


def test_data_that_runs_out_ends_the_run_normally() -> None:
    desk = Desk(groups_per_step=2, max_staleness=4, max_draws=3)
    desk.start()
    for group_id in range(3):
        desk.finish(group_id)
    desk.ask(1)
    desk.publish(1)
    end = only(desk.ask(2), SendNoMoreBatches)
    assert "data is used up" in end.reason
    assert only(desk.do(CheckpointTaken(version=1, path="c")), EndRun).status == "exhausted"
    assert desk.coordinator.counts().in_flight == 1


def test_a_run_without_workers_left_ends_with_a_reason() -> None:
    desk = Desk(num_workers=1)
    desk.start()
    desk.ask(1)
    desk.lose("w0")
    assert not has(desk.effects, EndRun), "a restart may come"
    desk.lose("w0", is_permanent=True)
    end = only(desk.effects, EndRun)
    assert end.status == "failed"
    assert "w0: lost" in end.reason


def test_a_lost_trainer_ends_the_run_as_failed() -> None:
    desk = Desk()
    desk.start()
    assert only(desk.do(TrainerLost(reason="killed")), EndRun).status == "failed"
    late = desk.report(desk.lease_of(0), group_id=0)
    assert has(late, StoreFinished), "what still arrives is kept for the resume"
    assert has(late, SendAck)


def test_payloads_are_purged_only_when_the_oldest_kept_checkpoint_covers_them() -> None:
    desk = Desk(groups_per_step=1, max_staleness=0, keep_checkpoints=2)
    desk.start()
    finish_all(desk, 3)
    covered = [only(desk.do(CheckpointTaken(version=v, path=f"c{v}")), PurgePayloads).covered_step for v in (1, 2, 3)]
    assert covered == [0, 1, 2]


@pytest.mark.parametrize("policy", ["drop_sample", "drop_group"])
def test_run_without_scores_ends_with_the_first_reason(policy: Any) -> None:
    desk = Desk(group_size=2, groups_per_step=1, max_staleness=0, max_filtered_batches=2, on_failure=policy)
    desk.start()
    for group in range(2):
        desk.finish(group, 0, kind="crashed", reason=f"scorer mine:score raised KeyError: {group}")
        if policy == "drop_sample":
            desk.finish(group, 1, kind="timed_out", reason="nothing within 5 s")
    reason = only(desk.effects, EndRun).reason
    assert "scoring fails; see the log of the reward service" in reason
    assert reason.endswith("the first failure: crashed, scorer mine:score raised KeyError: 0")
