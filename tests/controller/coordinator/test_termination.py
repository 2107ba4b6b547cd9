"""How a run ends: the step it ends with, the reason it gives, what it still waits for."""

from __future__ import annotations

from typing import Any

import pytest
from made_workers import made_worker

from controller.coordinator import termination
from controller.coordinator.effects import EndRun, EvalDropped, SendNoMoreBatches
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import LedgerState, SampleRecord
from controller.coordinator.worker import Worker


def state_of(**settings: Any) -> RunState:
    chosen = {"groups_per_step": 2, "group_size": 1, "num_steps": 9, "max_filtered_batches": 2, "num_eval_rows": 0}
    state = RunState(CoordinatorSettings(**{**chosen, **settings}))  # type: ignore[arg-type]
    state.phase = Phase.RUNNING
    return state


def failed(**fates: int) -> RunState:
    state = state_of()
    state.groups.has_kept = True
    state.groups.consecutive_failures.update(fates)
    return state


def no_usable_group_reason(state: RunState) -> str:
    return termination.no_usable_group_reason(state.settings, state.groups)


def test_a_run_gives_up_after_so_many_steps_worth_of_groups_without_one_to_train_on() -> None:
    assert no_usable_group_reason(failed(filtered=3)) == ""
    assert "4 groups in a row" in no_usable_group_reason(failed(filtered=4))
    never = state_of(max_filtered_batches=0)
    never.groups.has_kept = True
    never.groups.consecutive_failures["filtered"] = 100
    assert no_usable_group_reason(never) == ""


def test_the_most_frequent_fate_is_named_with_its_number_and_its_advice() -> None:
    reason = no_usable_group_reason(failed(filtered=1, timeout=3))
    assert "(3 timeout, 1 filtered); most were timeout (3): answers take longer than" in reason
    assert "scoring fails" in no_usable_group_reason(failed(verdict_crashed=4))
    assert "see the controller's log" in no_usable_group_reason(failed(unheard_of=4))


def test_the_first_failure_is_reported_only_where_scoring_failed() -> None:
    for fate, is_reported in (("too_few_scores", True), ("verdict_crashed", True), ("timeout", False)):
        state = failed(**{fate: 4})
        assert "the first failure" not in no_usable_group_reason(state)
        state.groups.first_failure = "crashed, no module"
        assert ("the first failure: crashed, no module" in no_usable_group_reason(state)) is is_reported


@pytest.mark.parametrize("fate", ["rejected", "lost_too_often"])
def test_the_last_reason_of_rejected_and_lost_samples_is_given(fate: str) -> None:
    state = failed(**{fate: 4})
    assert "the last reason" not in no_usable_group_reason(state)
    why = "the teacher did not answer: http://h failed 4 times"
    state.groups.last_rejection = state.groups.last_loss = why
    reason = no_usable_group_reason(state)
    assert reason.endswith(f"; the last reason: {why}")
    assert "workers crash" not in reason


@pytest.mark.parametrize("fate", ["too_few_scores", "verdict_invalid"])
def test_a_run_without_a_reward_service_is_not_advised_to_read_its_log(fate: str) -> None:
    state = failed(**{fate: 4})
    state.settings = state_of(has_reward_service=False).settings
    state.groups.first_failure = "invalid, its client sent no reward"
    reason = no_usable_group_reason(state)
    assert "reward.log" not in reason
    assert "the workflow gives no reward; see rollout.workflow_options" in reason
    assert reason.endswith("the first failure: invalid, its client sent no reward")


@pytest.mark.parametrize(
    ("rejected", "filtered", "has_kept", "ends"),
    [(1, 0, False, False), (2, 0, False, True), (2, 0, True, False), (2, 1, False, False)],
)
def test_a_run_whose_first_step_is_rejected_whole_ends_at_once(
    rejected: int, filtered: int, has_kept: bool, ends: bool
) -> None:
    state = failed(rejected=rejected, filtered=filtered)
    state.groups.has_kept, state.groups.last_rejection = has_kept, "too long"
    expected = f"all of the first {rejected} prompts were rejected: too long" if ends else ""
    assert no_usable_group_reason(state) == expected


def test_refused_prompts_are_no_rejected_ones_but_keep_no_run_with_only_rejected_ones_going() -> None:
    state = failed(refused=3)
    state.groups.has_kept = False
    assert no_usable_group_reason(state) == ""
    state = failed(rejected=1, refused=2)
    state.groups.has_kept, state.groups.last_rejection = False, "too long"
    assert no_usable_group_reason(state) == ""
    state.groups.consecutive_failures["rejected"] = 2
    state.groups.consecutive_failures["refused"] = 1
    assert no_usable_group_reason(state) == "all of the first 2 prompts were rejected: too long"


def test_refused_answers_do_not_advise_to_read_the_log_of_scorers() -> None:
    state = failed(too_few_scores=4)
    state.groups.first_failure = "refused, refused by the safety stage words"
    reason = no_usable_group_reason(state)
    assert "reward.log" not in reason
    assert "change rollout.safety" in reason
    assert reason.endswith("the first failure: refused, refused by the safety stage words")


def add(state: RunState, name: str, **facts: Any) -> Worker:
    state.workers[name] = worker = made_worker(name, **{"is_present": True, **facts})
    return worker


def stuck(**settings: Any) -> RunState:
    state = state_of(**settings)
    state.trainer.requested, state.trainer.trained = 1, 0
    add(state, "w0", quarantine="bad checksum", load_attempts=4)
    return state


def test_a_run_without_usable_workers_names_what_is_wrong_with_each() -> None:
    state = stuck(num_workers=2)
    assert termination.no_workers_reason(state) == "", "one is still to come"
    add(state, "w1", is_present=False, is_gone=True)
    assert termination.no_workers_reason(state) == (
        "no rollout worker is left for batch 1 (w0: bad checksum; w1: lost)"
    )


def test_without_a_batch_that_is_owed_the_run_goes_on() -> None:
    for requested, shipped in ((None, 0), (1, 1)):
        state = stuck()
        state.trainer.requested, state.trainer.shipped = requested, shipped
        assert termination.no_workers_reason(state) == ""


def test_a_version_on_its_way_is_waited_for_only_by_workers_that_are_there() -> None:
    state = stuck()
    state.trainer.trained, state.trainer.sent = 0, 1
    assert termination.no_workers_reason(state) == ""
    add(state, "w0", is_present=False, is_gone=True)
    assert "w0: lost" in termination.no_workers_reason(state)


@pytest.mark.parametrize(
    ("status", "shipped", "sent", "trained", "base", "last_step"),
    [
        ("completed", 5, 4, 3, 0, 5),
        ("completed", 12, 4, 3, 0, 9),
        ("exhausted", 2, 2, 2, 4, 4),
        ("stopped", 5, 5, 3, 0, 4),
        ("stopped", 5, 3, 3, 0, 3),
        ("failed", 0, 0, 4, 4, 4),
    ],
)
def test_an_orderly_end_uses_every_recorded_batch_and_any_other_only_the_running_step(
    status: Any, shipped: int, sent: int, trained: int, base: int, last_step: int
) -> None:
    state = state_of()
    state.trainer.shipped, state.trainer.sent, state.trainer.trained, state.trainer.base = shipped, sent, trained, base
    state.evaluations.jobs.append(EvalJob(0, 0, "v0", "l0", "periodic", 1, [0]))
    termination.begin(state, status, "why")
    assert (state.phase, state.ending.status, state.ending.reason) == (Phase.FINISHING, status, "why")
    assert state.ending.last_step == last_step
    is_orderly = status in ("completed", "exhausted")
    assert bool(state.evaluations.jobs) is is_orderly
    kinds = [type(effect) for effect in state.take_effects()]
    assert (SendNoMoreBatches in kinds) is (EvalDropped in kinds) is not is_orderly
    termination.begin(state, "failed", "later")
    assert state.ending.reason == "why", "the first reason counts"


@pytest.mark.parametrize(
    ("version", "requested", "ends"), [(8, None, False), (9, None, True), (8, 9, False), (8, 10, True)]
)
def test_a_run_is_complete_when_its_last_version_is_there_or_the_trainer_asks_beyond_it(
    version: int, requested: int | None, ends: bool
) -> None:
    state = state_of()
    trainer = state.trainer
    trainer.shipped, trainer.version, trainer.requested, trainer.sent, trainer.trained = (
        9,
        version,
        requested,
        9,
        version,
    )
    termination.advance(state)
    assert (state.phase is not Phase.RUNNING) is ends


def finishing(status: Any = "completed", **facts: Any) -> RunState:
    state = state_of(eval_at_end=False)
    state.phase, state.ending.status, state.ending.reason = Phase.FINISHING, status, "why"
    for name, value in {"last_step": 3, "trained": 3, "version": 3, "is_trainer_notified": True, **facts}.items():
        setattr(state.ending if hasattr(state.ending, name) else state.trainer, name, value)
    return state


def effects(state: RunState) -> list[Any]:
    termination.advance(state)
    return state.take_effects()


@pytest.mark.parametrize(("checkpoints", "ends"), [([], False), ([2], False), ([3], True), ([2, 4], True)])
def test_a_run_ends_when_its_last_step_is_saved(checkpoints: list[int], ends: bool) -> None:
    state = finishing(checkpoints=checkpoints)
    assert any(isinstance(effect, EndRun) for effect in effects(state)) is ends
    assert (state.phase is Phase.OVER) is ends


def test_a_run_that_trained_nothing_in_this_life_needs_no_new_checkpoint() -> None:
    assert any(isinstance(effect, EndRun) for effect in effects(finishing(base=3)))
    assert any(isinstance(effect, EndRun) for effect in effects(finishing("stopped", base=3, trained=-1)))
    assert not effects(finishing(base=3, trained=2)), "an orderly end waits until the trainer is there again"


def test_the_trainer_learns_once_that_no_batch_follows() -> None:
    state = finishing(is_trainer_notified=False)
    (sent,) = effects(state)
    assert (sent.last_step, sent.reason) == (3, "why")
    assert effects(state) == []
    state.trainer.requested = 3
    assert effects(state) == [], "a batch that it still gets"
    state.trainer.requested = 4
    assert [type(effect) for effect in effects(state)] == [SendNoMoreBatches]
    assert state.trainer.requested is None
    assert effects(finishing(is_trainer_notified=False, trained=2)) == []


def test_a_trainer_that_dies_at_a_stop_ends_the_run_with_the_checkpoint_it_started_from() -> None:
    for status, last_step in (("stopped", 1), ("failed", 1), ("completed", 3), ("exhausted", 3)):
        state = finishing(status, base=1)
        termination.trainer_died(state)
        assert state.ending.last_step == last_step


def test_evaluations_are_given_up_only_when_no_worker_is_left() -> None:
    state = finishing(checkpoints=[3], is_final_eval_made=True)
    state.evaluations.jobs.append(EvalJob(3, 3, "v3", "l0", "final", 1, [0]))
    worker = add(state, "w0")
    assert effects(state) == [], "the run waits for its evaluation"
    worker.is_present, worker.is_gone = False, True
    kinds = [type(effect) for effect in effects(state)]
    assert EvalDropped in kinds
    assert EndRun in kinds


def test_records_of_the_ledger_start_unfinished_and_without_restarts() -> None:
    record = SampleRecord(sample_index=0, num_tokens=1, first_version=0, last_version=0)
    assert (record.is_finished, record.is_kept, record.value) == (False, False, None)
    empty: dict[str, Any] = {"num_drawn": 0, "num_filtered": 0, "dropped": {}, "live": (), "batches": ()}
    state = LedgerState(num_lineages=3, checkpoints=(), evals=(), **empty)
    assert state.num_lives == 3
    assert LedgerState(num_lineages=3, num_trainer_restarts=2, checkpoints=(), evals=(), **empty).num_lives == 1
