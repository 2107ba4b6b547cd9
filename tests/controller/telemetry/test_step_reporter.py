"""Claims about step rows."""

from __future__ import annotations

import math
from io import StringIO

import pytest
from rich.console import Console

from areal_like.metrics import read_jsonl
from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.step_reporter import StepReporter
from controller.telemetry.summary import Tally


class Scene:
    """A reporter with a clock of its own."""

    def __init__(self, folder) -> None:
        self.now_s, self.tally, self.path = 100.0, Tally(), folder / "metrics.jsonl"
        self.shown = StringIO()
        display = Display("plain", Console(file=self.shown, width=250))
        self.steps = StepReporter(self.tally, display, Journal(self.path), num_steps=9, clock=lambda: self.now_s)

    def count(self, *, tokens: float, wait_s: float, busy_s: float) -> None:
        self.tally.add_counters("rollout-0", "a", {"tokens": tokens})
        self.tally.add_counters("trainer", "b", {"wait_s": wait_s, "busy_s": busy_s})

    @property
    def rows(self):
        return read_jsonl(self.path)


def test_row_joins_what_was_shipped_with_what_was_measured(tmp_path):
    scene = Scene(tmp_path)
    scene.count(tokens=500, wait_s=3, busy_s=0)
    scene.steps.starts()
    scene.steps.shipped(1, staleness=[0, 2], num_samples=8, num_tokens=100, is_replay=False)
    scene.count(tokens=900, wait_s=4, busy_s=3)
    scene.now_s += 4.0
    scene.steps.published(1, {"reward_mean": 0.5, "loss": 0.1, "grad_norm": 2.0, "kl": 0.01})
    (row,) = scene.rows
    assert (row["step"], row["staleness_mean"], row["staleness_max"], row["kl"]) == (1, 1.0, 2, 0.01)
    assert row["rollout_tokens_per_s"] == 100.0
    assert row["trainer_tokens_per_s"] == 25.0
    assert row["samples_per_s"] == 2.0
    assert row["trainer_wait_share"] == 0.25
    assert scene.tally.train_wall_s == 4.0
    assert "step 1/9  reward 0.500" in scene.shown.getvalue()


def test_replayed_steps_count_their_time_although_no_rollout_began(tmp_path):
    scene = Scene(tmp_path)
    scene.steps.shipped(3, staleness=[0], num_samples=2, num_tokens=10, is_replay=True)
    scene.now_s += 2.0
    scene.steps.published(3, {"loss": 0.0})
    assert scene.tally.train_wall_s == 2.0
    assert scene.rows[0]["is_replay"] is True


def test_metric_of_the_trainer_cannot_rename_the_step(tmp_path):
    scene = Scene(tmp_path)
    scene.steps.shipped(1, staleness=[1], num_samples=2, num_tokens=10, is_replay=False)
    scene.now_s += 1.0
    scene.steps.published(1, {"step": 77.0, "kind": 3.0, "staleness": 9.0})
    (row,) = scene.rows
    assert (row["kind"], row["step"], row["staleness"]) == ("step", 1, [1])


def test_restarted_worker_makes_no_negative_throughput(tmp_path):
    scene = Scene(tmp_path)
    scene.count(tokens=500, wait_s=3, busy_s=3)
    scene.steps.starts()
    scene.tally.counters.clear()
    scene.now_s += 1.0
    scene.steps.shipped(1, staleness=[], num_samples=0, num_tokens=0, is_replay=False)
    scene.steps.published(1, {})
    (row,) = scene.rows
    assert row["rollout_tokens_per_s"] == 0.0
    assert row["trainer_wait_share"] == 0.0


def test_missing_metric_is_unknown_not_zero(tmp_path):
    scene = Scene(tmp_path)
    scene.steps.published(5, {})
    assert "reward nan" in scene.shown.getvalue()
    assert scene.rows[0].get("reward_mean") is None
    assert not math.isnan(scene.tally.train_wall_s)


@pytest.mark.parametrize("seconds", [0.0, 1e-12])
def test_two_steps_in_one_moment_divide_by_nothing(tmp_path, seconds):
    scene = Scene(tmp_path)
    for step in (1, 2):
        scene.steps.shipped(step, staleness=[0], num_samples=1, num_tokens=1, is_replay=False)
        scene.now_s += seconds
        scene.steps.published(step, {})
    assert len(scene.rows) == 2


def test_time_left_follows_the_pace_of_the_newest_steps(tmp_path):
    scene = Scene(tmp_path)
    assert scene.steps.eta_s() is None
    assert scene.steps.wall_s() == 0.0
    scene.steps.starts()
    for step in (1, 2):
        scene.now_s += 3.0
        scene.steps.published(step, {})
    assert scene.steps.eta_s() == 7 * 3.0
    scene.now_s += 1.0
    assert scene.steps.eta_s() == 7 * 3.0 - 1.0
    assert scene.steps.wall_s() == 7.0
    for step in range(3, 40):
        scene.now_s += 0.5
        scene.steps.published(step, {})
    assert scene.steps.eta_s() == 0.0
