"""How many workers a run has: what is measured, when the rule acts, and that it never leaves its limits."""

from __future__ import annotations

import random
from typing import Any

import pytest
from desk import Desk
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import random_settings, run_schedule
from virtual_cluster import VirtualCluster, VirtualWorker

from controller.coordinator import autoscaling
from controller.coordinator.effects import AddWorker, Effect, Note, RetireWorker
from controller.coordinator.events import StopRequested, WorkerDraining, WorkerJoined
from controller.coordinator.settings import CoordinatorSettings, ScalingRule

WINDOW_S, WINDOWS = 4.0, 2
RULE = ScalingRule(min_workers=1, max_workers=3, window_s=WINDOW_S, windows=WINDOWS, settle_s=30.0)
ADD = AddWorker(max_workers=RULE.max_workers)


def decisions(effects: list[Effect]) -> list[AddWorker | RetireWorker]:
    return [one for one in effects if isinstance(one, AddWorker | RetireWorker)]


def notes(effects: list[Effect], kind: str) -> list[str]:
    return [one.text for one in effects if isinstance(one, Note) and one.kind == kind]


def ticked(desk: Desk, num_seconds: int) -> list[Effect]:
    return [effect for _ in range(num_seconds) for effect in desk.tick(1.0)]


def starved(rule: ScalingRule = RULE, **changes: Any) -> Desk:
    """One worker with one slot, a bound that allows much, and a trainer that waits."""
    desk = Desk(**{"groups_per_step": 8, "max_staleness": 4, "autoscale": rule, **changes})
    desk.start(capacity=2)
    desk.ask(1)
    return desk


def blocked(rule: ScalingRule = RULE, workers: tuple[str, ...] = ("w0", "w1"), **changes: Any) -> Desk:
    """Workers with many slots, of which the bound leaves most empty, and a trainer that is busy."""
    desk = Desk(**{"groups_per_step": 2, "max_staleness": 1, "autoscale": rule, "num_workers": len(workers), **changes})
    desk.start(workers=workers)
    return desk


def test_without_a_rule_nothing_happens() -> None:
    for desk in (starved(autoscale=None), blocked(autoscale=None)):
        assert decisions(ticked(desk, 100)) == []


def test_a_trainer_that_waits_while_all_slots_are_taken_gets_a_worker_after_the_windows_and_not_before() -> None:
    desk = starved()
    assert decisions(ticked(desk, int(WINDOW_S * WINDOWS) - 1)) == []
    effects = ticked(desk, 2)
    assert decisions(effects) == [ADD]
    (text,) = notes(effects, "scaled")
    assert text == (
        "a rollout worker is added (1 -> 2): the trainer waited for samples at least 30% of the time (last 100%) in "
        "each of the last 2 windows of 4 s"
    )


def test_a_worker_that_the_bound_leaves_without_work_is_removed_the_newest_first() -> None:
    desk = blocked()
    assert decisions(ticked(desk, int(WINDOW_S * WINDOWS) - 1)) == []
    effects = ticked(desk, 2)
    assert decisions(effects) == [RetireWorker(worker="w1", incarnation="a")]
    assert "w1 is removed (2 -> 1): the staleness bound left a worker without work" in notes(effects, "scaled")[0]


def test_a_batch_that_waits_for_its_longest_answers_needs_no_worker() -> None:
    desk = blocked()
    desk.ask(1)
    assert autoscaling.condition_of(desk.coordinator._state) == "balanced"
    assert decisions(ticked(desk, 100)) == []


def test_after_a_decision_the_rule_waits_until_it_has_taken_effect() -> None:
    desk = starved()
    assert decisions(ticked(desk, 9)) == [ADD]
    assert decisions(ticked(desk, 20)) == [], "the worker starts"
    desk.join("w1", capacity=2)
    assert decisions(ticked(desk, 3)) == [], "it loads its version"
    desk.load("w1", 0)
    assert decisions(ticked(desk, int(WINDOW_S * WINDOWS) - 1)) == [], "the windows begin again"
    assert decisions(ticked(desk, 2)) == [ADD]


def test_a_decision_that_takes_no_effect_counts_as_failed_after_its_deadline() -> None:
    desk = starved()
    assert len(decisions(ticked(desk, 9))) == 1
    assert decisions(ticked(desk, 30)) == []
    assert decisions(ticked(desk, 12)) == [ADD]


def test_the_limits_hold_and_the_upper_one_is_noted_once() -> None:
    one = ScalingRule(min_workers=1, max_workers=1, window_s=WINDOW_S, windows=WINDOWS)
    effects = ticked(starved(one), 100)
    assert decisions(effects) == []
    (text,) = notes(effects, "scale_limit")
    assert text.endswith("but there are rollout.autoscale.max_workers (1)")
    two = ScalingRule(min_workers=2, max_workers=3, window_s=WINDOW_S, windows=WINDOWS)
    assert decisions(ticked(blocked(two), 100)) == []


def test_one_worker_is_never_removed() -> None:
    assert decisions(ticked(blocked(workers=("w0",)), 100)) == []


def test_windows_that_disagree_change_nothing() -> None:
    desk = starved()
    for _ in range(20):
        ticked(desk, 4)
        desk.coordinator._state.trainer.requested = None if desk.coordinator._state.trainer.requested else 1
    assert decisions(desk.effects) == []


def test_external_workers_are_neither_counted_nor_removed() -> None:
    desk = blocked(workers=("w0",))
    desk.do(WorkerJoined(worker="w9", incarnation="a", capacity=64, is_external=True))
    desk.load("w9", 0)
    assert decisions(ticked(desk, 100)) == []
    assert [worker.name for worker in autoscaling.own_workers(desk.coordinator._state)] == ["w0"]


def test_a_draining_worker_is_no_longer_counted() -> None:
    desk = blocked()
    desk.do(WorkerDraining(worker="w1", incarnation="a"))
    assert decisions(ticked(desk, 100)) == [], "one is left"


def test_a_suspended_controller_draws_no_conclusion_from_the_time_it_slept() -> None:
    desk = starved()
    effects = [effect for _ in range(50) for effect in desk.tick(WINDOW_S + 1.0)]
    assert decisions(effects) == []


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        (lambda desk: None, "blocked"),
        (lambda desk: desk.do(StopRequested()), "paused"),
        (lambda desk: desk.ask(1), "balanced"),
        (lambda desk: setattr(desk.coordinator._state.trainer, "trained", -1), "paused"),
        (lambda desk: desk.lose("w0") and desk.lose("w1"), "paused"),
    ],
)
def test_only_the_steady_state_is_measured(change: Any, condition: str) -> None:
    desk = blocked()
    change(desk)
    assert autoscaling.condition_of(desk.coordinator._state) == condition


def test_the_end_of_the_work_removes_no_worker() -> None:
    desk = blocked(num_steps=1)
    assert autoscaling.condition_of(desk.coordinator._state) == "paused"


def test_the_end_of_the_work_adds_no_worker() -> None:
    desk = starved(num_steps=1, groups_per_step=1)
    assert autoscaling.condition_of(desk.coordinator._state) == "paused"


@pytest.mark.parametrize("change", [{"max_staleness": 0}, {"mode": "sync"}])
def test_with_a_bound_of_zero_a_worker_without_work_is_no_reason_to_remove_it(change: dict[str, Any]) -> None:
    desk = blocked(**change)
    assert autoscaling.condition_of(desk.coordinator._state) == "balanced"
    assert decisions(ticked(desk, 100)) == []


def test_an_evaluation_is_not_measured() -> None:
    desk = blocked(num_eval_rows=4, eval_at_start=True)
    assert desk.coordinator._state.evaluations.jobs
    assert autoscaling.condition_of(desk.coordinator._state) == "paused"


@pytest.mark.parametrize("wrong", [{"min_workers": 0}, {"min_workers": 4}, {"window_s": 0.0}, {"windows": 0}])
def test_a_rule_that_cannot_be_kept_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ScalingRule(**{"max_workers": 3, **wrong})


# ---------------------------------------------------------------- whole runs


class ScaledCluster(VirtualCluster):
    """Carries out the decisions: a worker is started, or drains like one that an operator drains."""

    def __init__(self, *parts: Any, **facts: Any) -> None:
        self.decided_s: list[float] = []
        self.num_first = facts["num_workers"]
        super().__init__(*parts, **facts)

    @property
    def own(self) -> list[VirtualWorker]:
        return [one for one in self.workers.values() if not one.is_external and not one.is_away and not one.is_leaving]

    def _carry_out(self, effect: Effect) -> None:
        rule = self.settings.autoscale
        assert rule is not None
        if isinstance(effect, AddWorker | RetireWorker):
            if self.decided_s:
                assert self.now_s - self.decided_s[-1] >= rule.window_s * rule.windows, "it acts too fast"
            self.decided_s.append(self.now_s)
        match effect:
            case AddWorker():
                number = next(n for n in range(99) if f"rollout-{n}" not in self.workers)
                worker = self.workers[f"rollout-{number}"] = VirtualWorker(f"rollout-{number}")
                assert len(self.own) <= rule.max_workers
                self.hello(worker)
            case RetireWorker():
                worker = self.workers[effect.worker]
                if str(worker.incarnation) == effect.incarnation and worker.is_alive and not worker.is_leaving:
                    assert len(self.own) > rule.min_workers
                    self._drain(worker)
        super()._carry_out(effect)

    def restart_worker(self) -> None:
        """Only by the supervisor: an operator who starts drained workers again would exceed the limits."""
        dead = [worker for worker in self.workers.values() if not worker.is_alive and not worker.is_away]
        if dead:
            self._restart(self.rng.choice(dead))

    def restart(self, *parts: Any, **facts: Any) -> None:
        self.workers = {f"rollout-{n}": self.workers[f"rollout-{n}"] for n in range(self.num_first)}
        self.decided_s.clear()
        super().restart(*parts, **facts)


def run_scaled(seed: int, rule: ScalingRule, num_actions: int = 200) -> ScaledCluster:
    chosen = random_settings(random.Random(seed))
    facts = {name: getattr(chosen, name) for name in chosen.__struct_fields__} | {"autoscale": rule, "num_steps": 8}
    cluster = run_schedule(seed, settings=CoordinatorSettings(**facts), num_actions=num_actions, make=ScaledCluster)
    assert isinstance(cluster, ScaledCluster)
    return cluster


def test_runs_whose_number_of_workers_changes_keep_the_invariants_and_the_limits_and_finish() -> None:
    rule = ScalingRule(max_workers=5, window_s=4.0, windows=1, add_at=0.2, remove_at=0.3, settle_s=20.0)
    num_decisions = sum(len(run_scaled(seed, rule).decided_s) for seed in range(60))
    assert num_decisions > 20, "the schedules have something to find"


def run_many(rule: ScalingRule) -> None:
    for seed in range(100):
        run_scaled(seed, rule)


def test_a_rule_that_miscounts_its_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = autoscaling.own_workers
    monkeypatch.setattr(autoscaling, "own_workers", lambda state: counted(state)[:1])
    with pytest.raises(AssertionError):
        run_many(ScalingRule(max_workers=3, window_s=4.0, windows=1, add_at=0.1, remove_at=1.0, settle_s=4.0))


@given(
    seed=st.integers(0, 1_000_000), windows=st.integers(1, 3), add_at=st.floats(0.05, 1), remove_at=st.floats(0.05, 1),
    max_workers=st.integers(3, 6),
)  # fmt: skip
@settings(deadline=None)
def test_any_rule_keeps_its_limits_and_its_pace(
    seed: int, windows: int, add_at: float, remove_at: float, max_workers: int
) -> None:
    rule = ScalingRule(
        max_workers=max_workers, window_s=4.0, windows=windows, add_at=add_at, remove_at=remove_at, settle_s=20.0
    )
    run_scaled(seed, rule)
