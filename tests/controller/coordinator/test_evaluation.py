"""Claims about evaluations: which rows go to whom, what counts as a result, and when one is given up."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from desk import Desk, has, leased, only, part
from made_workers import made_worker

from controller.coordinator import evaluation
from controller.coordinator.effects import (
    Effect,
    EvalDone,
    EvalDropped,
    Note,
    RecordEval,
    SendAck,
    SendCancel,
    SendVersion,
    StoreFinished,
)
from controller.coordinator.eval_job import EvalJob
from controller.coordinator.events import EvalKind, LeaseReturned, Published, WorkerDraining
from controller.coordinator.run_state import Phase, RunState
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import EvaluationUnderWay


def evaluating(*, workers: tuple[str, ...] = ("w0",), capacity: int = 64, **changes: Any) -> Desk:
    """A run whose baseline evaluation has begun."""
    settings: dict[str, Any] = {"groups_per_step": 1, "num_steps": 9, "max_staleness": 0, "num_eval_rows": 3}
    desk = Desk(**{**settings, **changes})
    desk.start(workers=workers, capacity=capacity)
    return desk


def periodic(**changes: Any) -> Desk:
    """A run that evaluates every second version and not at its start."""
    return evaluating(**{"eval_at_start": False, "eval_every_steps": 2, **changes})


def rows(desk: Desk) -> list[int]:
    """Rows leased now."""
    return sorted(order.group_id for _, order in desk.held.values() if order.purpose == "eval")


def eval_holders(desk: Desk) -> Counter[str]:
    return Counter(worker for worker, order in desk.held.values() if order.purpose == "eval")


def train(desk: Desk, step: int, *, workers: tuple[str, ...] = ("w0",)) -> list[Effect]:
    """One step: its group is finished, its version published and loaded."""
    desk.finish(step - 1, first=step - 1)
    before = len(desk.effects)
    desk.ask(step)
    desk.publish(step)
    for worker in workers:
        desk.load(worker, step)
    return desk.effects[before:]


def notes(effects: list[Effect], kind: str) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == kind]


# ---------------------------------------------------------------- results


def test_an_evaluation_is_done_when_every_row_is_answered_and_its_values_are_in_the_order_of_rows() -> None:
    desk = evaluating()
    assert rows(desk) == [0, 1, 2]
    desk.finish(2, purpose="eval", value=0.25)
    assert desk.coordinator.evaluations() == [EvaluationUnderWay(version=0, num_done=1, num_rows=3)]
    before = desk.coordinator.progress
    stored = only(desk.finish(0, purpose="eval", value=1.0), StoreFinished)
    outcome = stored.outcome
    assert (stored.purpose, outcome.group_id, outcome.sample_index, outcome.num_tokens) == ("eval", 0, 0, 5)
    assert (outcome.first_version, outcome.last_version, stored.value, stored.is_kept) == (0, 0, 1.0, True)
    assert desk.coordinator.progress > before
    assert not has(desk.effects, EvalDone)
    effects = desk.finish(1, purpose="eval", kind="timed_out")
    assert (only(effects, StoreFinished).value, only(effects, StoreFinished).is_kept) == (None, False)
    done, recorded = only(effects, EvalDone), only(effects, RecordEval)
    assert (done.version, done.requested_version, done.kind, done.values) == (0, 0, "baseline", (1.0, None, 0.25))
    assert (recorded.version, recorded.lineage, recorded.kind, recorded.values) == (0, "l0", "baseline", done.values)
    assert desk.coordinator.evaluations() == []


def test_a_row_answered_by_mixed_or_other_versions_is_refused_acknowledged_and_leased_again() -> None:
    desk = evaluating(num_eval_rows=1)
    for first, last in ((0, 1), (1, 1), (-1, 0)):
        lease_id = desk.lease_of(0, purpose="eval")
        effects = desk.finish(0, purpose="eval", first=first, last=last)
        assert not has(effects, StoreFinished)
        assert only(effects, SendAck).lease_ids == (lease_id,)
        assert notes(effects, "refused") == ["w0: eval row 0 mixes versions; version 0 is required"]
        assert desk.lease_of(0, purpose="eval") != lease_id
    assert only(desk.finish(0, purpose="eval"), EvalDone).values == (1.0,)


def test_a_rejected_row_has_no_value_and_another_reason_leases_it_again() -> None:
    desk = evaluating(num_eval_rows=2)
    desk.give_back(desk.lease_of(0, purpose="eval"), 0, [], "drain")
    assert rows(desk) == [0, 1]
    effects = desk.give_back(desk.lease_of(0, purpose="eval"), 0, [], "rejected", "too long")
    assert notes(effects, "eval_rejected") == ["eval row 0 was rejected: too long"]
    assert rows(desk) == [1]
    effects = desk.give_back(desk.lease_of(1, purpose="eval"), 0, [], "refused", "the stage words refuses it")
    assert notes(effects, "eval_refused") == ["eval row 1 was refused: the stage words refuses it"]
    assert only(effects, EvalDone).values == (None, None)


def test_a_row_lost_once_too_often_has_no_value() -> None:
    desk = evaluating(num_eval_rows=2, max_sample_losses=2)
    desk.finish(1, purpose="eval")
    for _ in range(2):
        assert not has(desk.give_back(desk.lease_of(0, purpose="eval"), 0, [], "drain"), EvalDone)
    done = only(desk.give_back(desk.lease_of(0, purpose="eval"), 0, [], "drain"), EvalDone)
    assert done.values == (None, 1.0)


# ---------------------------------------------------------------- when one is due


def test_a_run_without_eval_rows_evaluates_nothing() -> None:
    desk = evaluating(num_eval_rows=0, eval_every_steps=1)
    train(desk, 1)
    assert rows(desk) == []
    assert not has(desk.effects, EvalDone)


def test_periodic_evaluations_come_at_multiples_and_not_at_the_start_nor_with_the_final_one() -> None:
    desk = periodic(num_steps=4, num_eval_rows=2)
    evaluated = []
    for step in range(1, 5):
        train(desk, step)
        while rows(desk):
            desk.finish(rows(desk)[0], purpose="eval", first=step)
        evaluated += [effect for effect in desk.effects if isinstance(effect, EvalDone)][len(evaluated) :]
    assert [(done.version, done.kind) for done in evaluated] == [(2, "periodic"), (4, "final")]


def test_the_last_version_has_a_periodic_evaluation_where_there_is_no_final_one() -> None:
    desk = periodic(num_steps=2, eval_at_end=False)
    train(desk, 1)
    train(desk, 2)
    for row in range(3):
        effects = desk.finish(row, purpose="eval", first=2)
    assert only(effects, EvalDone).kind == "periodic"


def test_a_periodic_evaluation_has_its_own_number_of_rows_and_none_where_that_is_zero() -> None:
    for number in (0, 1):
        desk = periodic(num_periodic_eval_rows=number)
        train(desk, 1)
        train(desk, 2)
        assert rows(desk) == list(range(number))


def test_a_final_evaluation_of_a_version_evaluated_whole_reuses_its_values() -> None:
    desk = evaluating(num_steps=0)
    for row, value in ((0, 1.0), (1, 0.0), (2, 0.5)):
        if rows(desk):
            desk.finish(row, purpose="eval", value=value)
    done = [effect for effect in desk.effects if isinstance(effect, EvalDone)]
    assert {one.values for one in done} == {(1.0, 0.0, 0.5)}
    assert done[-1].kind == "final"
    assert rows(desk) == []


# ---------------------------------------------------------------- pins


def test_a_baseline_uses_every_worker_and_a_periodic_evaluation_one() -> None:
    both = ("w0", "w1")
    desk = evaluating(workers=both, num_workers=2, capacity=2, num_eval_rows=8)
    assert set(eval_holders(desk)) == set(both)
    desk = periodic(workers=both, num_workers=2, capacity=2, num_eval_rows=8)
    train(desk, 1, workers=both)
    train(desk, 2, workers=both)
    assert len(eval_holders(desk)) == 1


def test_a_pinned_worker_gets_no_newer_version_until_its_evaluation_is_done() -> None:
    desk = evaluating(num_eval_rows=1, max_staleness=4)
    desk.finish(0)
    desk.ask(1)
    assert not has(desk.publish(1), SendVersion)
    sent = only(desk.finish(0, purpose="eval"), SendVersion)
    assert (sent.worker, sent.version) == ("w0", 1)


def test_an_evaluation_gets_half_of_the_credits_while_there_is_training_work() -> None:
    desk = evaluating(capacity=4, num_eval_rows=9, groups_per_step=9)
    assert Counter(order.purpose for _, order in desk.held.values()) == {"eval": 2, "train": 2}
    desk = evaluating(capacity=4, num_eval_rows=9, groups_per_step=3)
    assert Counter(order.purpose for _, order in desk.held.values()) == {"train": 1, "eval": 3}
    desk = evaluating(capacity=1, num_eval_rows=9, groups_per_step=9)
    assert Counter(order.purpose for _, order in desk.held.values()) == {"eval": 1}


@pytest.mark.parametrize("leaves", ["lost", "drains"])
def test_rows_of_a_worker_that_leaves_go_to_the_others_from_scratch(leaves: str) -> None:
    desk = evaluating(workers=("w0", "w1"), num_workers=2, capacity=8, num_eval_rows=6)
    gone = {order.group_id for worker, order in desk.held.values() if worker == "w0" and order.purpose == "eval"}
    assert gone
    effects = desk.lose("w0") if leaves == "lost" else desk.do(WorkerDraining(worker="w0"))
    again = [order for order in leased(effects) if order.purpose == "eval"]
    assert {order.group_id for order in again} == gone
    assert {(order.prefix_tokens, order.min_version, order.sample_index) for order in again} == {(0, 0, 0)}


def test_an_evaluation_goes_from_a_worker_that_is_late_with_its_version_to_another_one() -> None:
    both = ("w0", "w1")
    desk = periodic(workers=both, num_workers=2, load_deadline_s=10.0, group_timeout_s=1e6)
    train(desk, 1, workers=both)
    train(desk, 2, workers=())
    (pinned,) = desk.coordinator._state.evaluations.jobs[0].workers
    (other,) = set(both) - {pinned}
    desk.load(other, 2)
    assert rows(desk) == []
    assert notes(desk.tick(10.5), "quarantined") == [
        f"{pinned} cannot load version 2: it did not receive the version within 10 s"
    ]
    desk.tick(1.0)
    assert eval_holders(desk) == {other: 3}
    desk.load(pinned, 2)
    for row in range(3):
        desk.finish(row, purpose="eval", first=2)
    assert only(desk.effects, EvalDone).version == 2


def test_the_evaluation_of_the_only_worker_goes_on_once_its_quarantine_has_ended() -> None:
    desk = periodic(load_deadline_s=10.0, group_timeout_s=1e6)
    train(desk, 1)
    train(desk, 2, workers=())
    desk.tick(10.5)
    assert desk.coordinator._state.workers["w0"].weights.pin is None
    desk.tick(100.0)
    desk.load("w0", 2)
    assert rows(desk) == [0, 1, 2]


# ---------------------------------------------------------------- giving up


def test_an_evaluation_is_given_up_only_after_its_deadline_and_every_result_moves_that() -> None:
    desk = evaluating(num_eval_rows=2, group_timeout_s=10.0)
    assert not has(desk.tick(10.0), EvalDropped)
    desk.finish(0, purpose="eval")
    lease_id = desk.lease_of(1, purpose="eval")
    assert not has(desk.tick(10.0), EvalDropped), "ten seconds after the last result, not more"
    effects = desk.tick(0.5)
    dropped = only(effects, EvalDropped)
    assert (dropped.version, dropped.kind, dropped.reason) == (0, "baseline", "no result for 10 s")
    assert notes(effects, "eval_dropped") == ["evaluation of version 0 given up: no result for 10 s"]
    assert lease_id in {i for effect in effects if isinstance(effect, SendCancel) for i in effect.lease_ids}
    assert rows(desk) == []
    assert not has(desk.tick(100.0), EvalDropped), "once"


def test_of_more_than_two_waiting_periodic_evaluations_the_oldest_is_dropped() -> None:
    """One that has its worker goes on, and one of another kind is not counted."""
    state = RunState(CoordinatorSettings(groups_per_step=1, group_size=1, num_steps=9, num_eval_rows=2))
    kinds: tuple[EvalKind, ...] = ("baseline", "periodic", "periodic", "periodic", "periodic", "periodic")
    dropped = []
    for version, kind in enumerate(kinds):
        state.trainer.version = version
        evaluation.request(state, kind)
        if version == 1:
            state.evaluations.jobs[-1].workers.add("w0")
            state.workers["w0"] = made_worker("w0", pin=state.evaluations.jobs[-1])
        dropped.append([effect.version for effect in state.take_effects() if isinstance(effect, EvalDropped)])
    assert dropped == [[], [], [], [], [2], [3]]
    assert [job.version for job in state.evaluations.jobs] == [0, 1, 4, 5]


# ---------------------------------------------------------------- single decisions


def state_at(version: int, **changes: Any) -> RunState:
    """A run at this version, with a worker that has loaded it."""
    settings: dict[str, Any] = {"groups_per_step": 1, "group_size": 1, "num_steps": 9, "num_eval_rows": 2, **changes}
    state = RunState(CoordinatorSettings(**settings))
    state.phase, state.trainer.version, state.trainer.manifest_path, state.trainer.version_lineage = (
        Phase.RUNNING,
        version,
        "newest",
        "l1",
    )
    state.workers["w0"] = made_worker("w0", is_present=True, capacity=4, version=version, announced=version)
    return state


def job_at(state: RunState, version: int, kind: EvalKind = "periodic") -> EvalJob:
    job = EvalJob(version, version, f"v{version}", "l0", kind, 2, [0, 1])
    state.evaluations.jobs.append(job)
    return job


def test_a_final_evaluation_reuses_values_of_every_row_and_no_fewer() -> None:
    state = state_at(5)
    state.evaluations.done[5] = (1.0, 0.0)
    evaluation.request_final(state)
    done = only(state.take_effects(), EvalDone)
    assert (done.version, done.requested_version, done.kind, done.values) == (5, 5, "final", (1.0, 0.0))
    assert state.evaluations.jobs == []
    for known in ((1.0,), ()):
        state = state_at(5)
        state.evaluations.done[5] = known
        evaluation.request_final(state)
        assert state.take_effects() == []
        (job,) = state.evaluations.jobs
        assert (job.kind, job.version, job.num_rows, job.pending) == ("final", 5, 2, [0, 1])


def test_a_periodic_evaluation_of_the_last_version_becomes_the_final_one_with_the_rows_it_lacked() -> None:
    state = state_at(5, num_eval_rows=4, num_periodic_eval_rows=2)
    other, job = job_at(state, 4), job_at(state, 5)
    job.pending.clear()
    evaluation.request_final(state)
    assert (job.kind, job.num_rows, job.pending) == ("final", 4, [2, 3])
    assert (other.kind, other.num_rows, state.evaluations.jobs) == ("periodic", 2, [other, job])


@pytest.mark.parametrize("changes", [{"num_eval_rows": 0}, {"eval_at_end": False}])
def test_no_final_evaluation_where_none_is_configured(changes: dict[str, Any]) -> None:
    state = state_at(5, **changes)
    evaluation.request_final(state)
    assert (state.evaluations.jobs, state.take_effects()) == ([], [])


def test_a_version_made_again_is_fetched_from_its_new_place_by_its_own_evaluation_only() -> None:
    state = state_at(5)
    mine, other = job_at(state, 5), job_at(state, 4)
    evaluation.published_again(state, Published(version=5, lineage="l1", manifest_path="again"))
    assert (mine.manifest_path, mine.lineage) == ("again", "l1")
    assert (other.manifest_path, other.lineage) == ("v4", "l0")


def test_an_evaluation_no_worker_can_go_back_to_takes_the_newest_version_and_starts_from_scratch() -> None:
    state = state_at(5)
    job = job_at(state, 3)
    job.values[0], job.pending = 1.0, [1]
    evaluation.advance(state)
    assert (job.version, job.requested_version, job.manifest_path, job.lineage) == (5, 3, "newest", "l1")
    assert (job.values, job.pending, job.workers) == ({}, [0, 1], {"w0"})
    assert state.workers["w0"].weights.pin is job
    assert notes(state.take_effects(), "eval_repinned") == ["evaluation of version 3 is moved to version 5"]


@pytest.mark.parametrize("why", ["baseline", "requested", "done"])
def test_an_evaluation_no_worker_can_go_back_to_is_dropped_where_the_newest_is_no_substitute(why: str) -> None:
    state = state_at(5)
    job = job_at(state, 3, "baseline" if why == "baseline" else "periodic")
    if why == "requested":
        job_at(state, 5)
    if why == "done":
        state.evaluations.done[5] = (1.0, 1.0)
    evaluation.advance(state)
    dropped = only(state.take_effects(), EvalDropped)
    assert (dropped.version, dropped.reason) == (3, "no worker can load version 3 any more")
    assert job not in state.evaluations.jobs


def test_an_evaluation_waits_while_no_worker_is_usable_or_all_are_pinned() -> None:
    state = state_at(5)
    state.workers["w0"].is_present = False
    state.workers.changed(state.workers["w0"])
    job = job_at(state, 3)
    evaluation.advance(state)
    assert (job.version, job.workers, state.take_effects()) == (3, set(), [])


def test_a_row_given_back_is_not_held_any_more() -> None:
    state = state_at(5)
    job = job_at(state, 5)
    evaluation.advance(state)
    first = evaluation.lease_row(state, state.workers["w0"])
    second = evaluation.lease_row(state, state.workers["w0"])
    assert first is not None
    assert second is not None
    assert evaluation.lease_row(state, state.workers["w0"]) is None
    assert (job.held["w0"], job.lease_ids) == (2, {first.lease_id, second.lease_id})
    evaluation.take_back(state, first, LeaseReturned(worker="w0", part=part(first.lease_id, 0, []), reason="drain"))
    assert (job.held["w0"], job.lease_ids, job.pending) == (1, {second.lease_id}, [0])


def test_an_evaluation_whose_last_row_goes_with_its_worker_once_too_often_is_done() -> None:
    desk = evaluating(num_eval_rows=1, max_sample_losses=0)
    assert only(desk.lose("w0"), EvalDone).values == (None,)


@pytest.mark.parametrize(("capacity", "num_eval"), [(1, 1), (2, 1), (3, 1), (8, 4), (9, 4)])
def test_evaluation_takes_half_of_a_worker_while_there_is_training_work(capacity: int, num_eval: int) -> None:
    desk = Desk(groups_per_step=32, group_size=1, num_steps=2, num_eval_rows=32)
    desk.start(capacity=capacity)
    held = [order.purpose for _, order in desk.held.values()]
    assert (held.count("eval"), held.count("train")) == (num_eval, capacity - num_eval)
