"""What the monitor passes on from a run, to whom, and when; all of its readers only record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.wire.messages import CheckpointFailed, CheckpointSaved
from controller.coordinator.snapshot import Counts, EvaluationUnderWay
from controller.runtime import monitor as monitor_module
from controller.runtime.monitor import Monitor
from controller.runtime.supervisor import Loss
from controller.telemetry.progress import Progress
from controller.telemetry.pulse import ProcessNow


class Bench:
    """A run of one worker that the test plays; the clock begins at 100."""

    def __init__(self) -> None:
        self.now_s, self.is_status_due, self.news = 100.0, False, list[Any]()
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.status: list[dict[str, Any]] = []
        self.notes: list[tuple[str, str]] = []
        self.shown: list[Any] = []
        self.offered: list[dict[str, Any]] = []
        self.counters: list[tuple[str, str, dict[str, float]]] = []
        self.num_evaluated = 0
        counts = Counts(
            drawn=9, consumed=3, filtered=1, dropped={"stale": 2, "timeout": 1}, running=1, ready=1, samples_finished=8
        )
        heartbeat = SimpleNamespace(counters={"tokens": 5.0})
        telemetry = SimpleNamespace(
            tally=SimpleNamespace(
                add_counters=lambda *of: self.counters.append(of), steps=6, accuracy={10: 0.5, 2: 0.25}, is_resumed=True
            ),
            display=SimpleNamespace(show=self.shown.append, note=lambda text, kind: self.notes.append((text, kind))),
            journal=SimpleNamespace(measure=lambda kind, **row: self.rows.append((kind, row)), last_step={"step": 6}),
            status=SimpleNamespace(
                is_due=lambda: self.is_status_due, write=lambda phase, **row: self.status.append({"phase": phase} | row)
            ),
            sinks=SimpleNamespace(news=lambda: self.news, offer=self.offered.append, take_rows=lambda: []),
        )
        components = SimpleNamespace(
            telemetry=telemetry,
            coordinator=SimpleNamespace(
                version=7, waits=lambda: ["a waits"], counts=lambda: counts,
                evaluations=lambda: [EvaluationUnderWay(version=20, num_done=self.num_evaluated, num_rows=50)],
            ),
            supervisor=SimpleNamespace(
                states=lambda: {"rollout-0": "generate"},
                processes=lambda: {"rollout-0": ProcessNow("rollout", "generate", 4)},
                cpu_seconds=lambda: {"trainer": 2.0, "controller": 1.23456},
                queue_seconds=lambda: {"trainer": 0.5, "controller": 0.12345},
            ),
            hub=SimpleNamespace(peers={
                "rollout-0": SimpleNamespace(role="rollout", incarnation="i", heartbeat=heartbeat),
                "trainer": SimpleNamespace(role="trainer", incarnation="j", heartbeat=None),
                "candidate/1": SimpleNamespace(role="candidate", incarnation="k", heartbeat=heartbeat),
            }),
        )  # fmt: skip
        steps = SimpleNamespace(
            eta_s=lambda: 33.0, wall_s=lambda: 1.23456, progress=lambda: Progress("steps", 6, 9, 33.0)
        )
        self.monitor = Monitor(components, steps=steps, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.monitor.tick()


COUNTS = {"drawn": 9, "consumed": 3, "filtered": 1, "dropped": 3, "running": 1, "ready": 1}


def test_every_tick_takes_in_heartbeats_and_shows_the_moment() -> None:
    bench = Bench()
    bench.tick(1.0)
    assert bench.counters == [("rollout-0", "i", {"tokens": 5.0})]
    (shown,) = bench.shown
    assert (shown.version, shown.waits, shown.states, shown.counts, shown.elapsed_s) == (
        7, ["a waits"], {"rollout-0": "generate"}, COUNTS, 1.0,
    )  # fmt: skip
    assert shown.is_resumed
    assert shown.progress == [Progress("steps", 6, 9, 33.0), Progress("evaluation of version 20", 0, 50)]
    bench.num_evaluated = 20
    bench.tick(10.0)
    assert bench.shown[-1].progress[1].left_s == 15.0


def test_a_pulse_is_written_at_once_and_then_after_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []
    monkeypatch.setattr(monitor_module, "interval_s", lambda *of: asked.append(of) or 4.0)
    bench = Bench()
    bench.tick(1.0)
    assert [kind for kind, _ in bench.rows] == ["pulse"]
    assert asked == [(1.0, 1)]
    row = bench.rows[0][1]
    processor = row.pop("processor")
    assert row == {
        "wall_s": 1.235, "version": 7, "waits": ["a waits"], "counts": COUNTS,
        "processes": {"rollout-0": ProcessNow("rollout", "generate", 4).row()},
    }  # fmt: skip
    assert list(processor["cpu_s"].items()) == [("controller", 1.23), ("trainer", 2.0)]
    assert list(processor["queue_s"].items()) == [("controller", 0.12), ("trainer", 0.5)]
    assert processor["machine"]["cores"] > 0
    assert processor["machine"]["busy_s"] > 0
    assert processor["cores"] > 0
    bench.tick(3.875)
    assert len(bench.rows) == 1
    bench.tick(0.125)
    assert len(bench.rows) == 2
    assert bench.status == bench.offered == []


def test_where_the_run_stands_is_written_when_that_is_due() -> None:
    bench = Bench()
    bench.tick()
    bench.is_status_due = True
    bench.tick()
    assert len(bench.rows) == 1, "that makes no pulse"
    processes = {"rollout-0": ProcessNow("rollout", "generate", 4).row()}
    assert bench.status == [{
        "phase": "running", "step": 6, "version": 7, "eta_s": 33.0, "waits": ["a waits"], "counts": COUNTS,
        "processes": processes, "last_step": {"step": 6}, "accuracy": {"2": 0.25, "10": 0.5},
    }]  # fmt: skip
    assert list(bench.status[0]["accuracy"]) == ["2", "10"]
    assert bench.offered == [{"kind": "now", "step": 6, "version": 7, "counts": COUNTS, "processes": processes}]


def test_at_the_end_both_are_written_whatever_is_due() -> None:
    bench = Bench()
    bench.tick()
    bench.monitor.last()
    assert ([kind for kind, _ in bench.rows], len(bench.status)) == (["pulse", "pulse"], 1)


def test_a_lost_process_that_says_hello_again_was_restarted_and_others_are_no_news() -> None:
    bench = Bench()
    bench.monitor.received("rollout-0")
    bench.monitor.lost(Loss("rollout-0", "rollout", "silent", is_permanent=False))
    bench.monitor.received("rollout-1")
    bench.monitor.received("rollout-0")
    bench.monitor.received("rollout-0")
    bench.monitor.lost(Loss("rollout-0", "rollout", "silent", is_permanent=True))
    assert [(kind, row["event"], row["reason"]) for kind, row in bench.rows] == [
        ("process", "lost", "silent"), ("process", "restarted", ""), ("process", "gone", "silent"),
    ]  # fmt: skip


def test_a_checkpoint_is_a_row_once_and_one_that_failed_a_warning(tmp_path: Path) -> None:
    bench = Bench()
    bench.monitor.checkpoint_saved(CheckpointSaved(version=3, path="/c", stall_s=1.0, write_s=2.0, num_bytes=9))
    bench.monitor.checkpoint_saved(CheckpointSaved(version=3, path="/c"))
    bench.monitor.checkpoint_failed(CheckpointFailed(version=4, reason="disk full"))
    assert bench.rows == [
        ("checkpoint", {"version": 3, "path": "/c", "stall_s": 1.0, "write_s": 2.0, "num_bytes": 9}),
        ("checkpoint_failed", {"version": 4, "reason": "disk full"}),
    ]
    assert bench.notes == [
        ("the checkpoint of version 4 could not be written: disk full; the run continues without it", "warning")
    ]


def test_a_sink_that_is_down_is_a_row_each_time_and_a_warning_once() -> None:
    bench = Bench()
    bench.news = [SimpleNamespace(sink="wandb", error="no route", facts=lambda: {"sink": "wandb", "lost": 3})]
    bench.tick()
    bench.tick()
    assert [row for kind, row in bench.rows if kind == "sink"] == [{"sink": "wandb", "lost": 3}] * 2
    assert bench.notes == [
        ("metrics sink wandb is down (no route); the run continues and counts the lost rows", "warning")
    ]
