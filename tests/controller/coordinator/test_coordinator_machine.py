"""The invariants under faults: thousands of seeded schedules, and hypothesis looking for the nastier ones.

Every event is checked by `virtual_cluster` and `ledger_model`: strict bound under wait and drop, exactly once, versions
that never decrease, invariant I, credits, counts that add up; at the end faults stop and the run must finish.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from example_counts import num_examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from real_cluster import RealCluster
from schedules import FAULTLESS, FAULTS, random_settings, run_schedule
from virtual_cluster import VirtualCluster

from controller.coordinator.events import StopRequested
from controller.coordinator.settings import CoordinatorSettings
from controller.ledger.audit import audit

NUM_SCHEDULES = 2000


@pytest.mark.thorough
def test_thousands_of_random_schedules_keep_the_invariants_and_finish() -> None:
    ends = [run_schedule(seed).end for seed in range(NUM_SCHEDULES)]
    completed = sum(end is not None and end.status == "completed" for end in ends)
    assert completed > 0.95 * NUM_SCHEDULES
    reasons = {end.reason for end in ends if end is not None and end.status == "failed"}
    expected = ("prompts were rejected", "no rollout worker is left")  # too long on purpose; loading failed too often
    assert all(any(words in reason for words in expected) for reason in reasons), reasons


@pytest.mark.parametrize("mode", ["async", "sync", "one_step_off"])
@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_no_deadlock_and_no_stale_group_at_staleness_zero_or_one(mode: Any, on_stale: Any) -> None:
    for seed in range(num_examples(60)):
        chosen = CoordinatorSettings(
            groups_per_step=3, group_size=2, num_steps=5, mode=mode, max_staleness=seed % 2, on_stale=on_stale,
            num_workers=2, max_sample_losses=50, max_filtered_batches=0,
        )  # fmt: skip
        cluster = run_schedule(seed, settings=chosen)
        assert cluster.end is not None
        assert cluster.end.status == "completed" or "rejected" in cluster.end.reason


def test_large_bounds_with_slow_workers_ship_every_group_in_time() -> None:
    for seed in range(num_examples(60)):
        chosen = CoordinatorSettings(
            groups_per_step=2, group_size=2, num_steps=12, max_staleness=5, on_stale="wait", num_workers=2,
            max_sample_losses=50, max_filtered_batches=0,
        )  # fmt: skip
        run_schedule(seed, settings=chosen, num_actions=500)


def test_a_stop_in_mid_run_ends_normally_and_a_resume_completes_it() -> None:
    for seed in range(num_examples(60)):
        rng = random.Random(seed)
        cluster = VirtualCluster(random_settings(rng), rng)
        for _ in range(rng.randint(0, 120)):
            if cluster.end is None:
                getattr(cluster, rng.choice(FAULTLESS))()
        if cluster.end is None:
            cluster.handle(StopRequested())
            assert cluster.run_to_end().status == "stopped"
        cluster.restart()
        assert cluster.run_to_end().status == "completed"
        cluster.check_end()


def test_the_real_ledger_agrees_with_the_model_over_crashes_and_its_audit_is_clean(tmp_path: Path) -> None:
    for seed in range(num_examples(40)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        cluster = run_schedule(seed, make=lambda *a, folder=folder, **k: RealCluster(*a, folder=folder, **k))
        assert isinstance(cluster, RealCluster)
        report = audit(folder)
        assert report.is_clean, report.lines()
        assert report.num_drawn == cluster.coordinator.counts().drawn
        cluster.real.close()


class CoordinatorMachine(RuleBasedStateMachine):
    """Hypothesis chooses settings and the order of actions; what an action hits is drawn from a seed it chooses."""

    @initialize(
        seed=st.integers(0, 10_000),
        hits=st.integers(0, 10_000),
        num_workers=st.integers(1, 3),
        capacity=st.sampled_from([1, 2, 5]),
        segment_tokens=st.sampled_from([0, 2]),
    )
    def start(self, seed: int, hits: int, num_workers: int, capacity: int, segment_tokens: int) -> None:
        self.cluster = VirtualCluster(
            random_settings(random.Random(seed)),
            random.Random(hits),
            num_workers=num_workers,
            capacity=capacity,
            segment_tokens=segment_tokens,
        )

    @rule(action=st.sampled_from(FAULTLESS))
    def go_on(self, action: str) -> None:
        if self.cluster.end is None:
            getattr(self.cluster, action)()

    @rule(action=st.sampled_from(FAULTS))
    def go_wrong(self, action: str) -> None:
        if self.cluster.end is None:
            getattr(self.cluster, action)()

    @rule(rounds=st.integers(1, 4))
    def calm(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.cluster.end is None:
                self.cluster.calm_round()

    @invariant()
    def waits_can_be_said(self) -> None:
        if hasattr(self, "cluster") and self.cluster.end is None:
            assert all(isinstance(line, str) for line in self.cluster.coordinator.waits())

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.run_to_end()
            self.cluster.check_end()


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(
    max_examples=4 * settings.default.max_examples,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
