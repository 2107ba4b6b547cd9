"""Workers join a real run: one is killed, one is preempted, and nothing is lost or repeated."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SLOW = [
    "emulation.speedup=20", "emulation.mean_tokens=2000", "rollout.engine.num_slots=4", "num_steps=2000",
    "groups_per_step=8", "group_size=4", "metrics.report=false", "trainer.weights.kind=stream",
]  # fmt: skip
"""On emulated GPUs whose few slots are always taken, so that a worker that ends always has samples."""


def test_workers_join_one_is_killed_one_is_preempted_and_nothing_is_lost(areal, tmp_path: Path) -> None:
    run = areal("train", "emulated", *SLOW, "rollout.num_workers=1")
    run.wait_for_step(1)
    copy = tmp_path / "invitation.json"
    shutil.copy2(run.folder / "keys" / "invitation.json", copy)
    first, second = areal("worker", "--join", str(run.folder)), areal("worker", "--join", str(copy))
    swapped = lambda: [row["worker"] for row in run.metrics("swap")]  # noqa: E731
    names = {"rollout-1", "rollout-2"}
    run.wait_until(lambda: all(swapped().count(name) > 2 for name in names), "three versions loaded by both")

    os.kill(second.pid_of("rollout"), signal.SIGKILL)
    assert second.wait() == 1
    assert "its samples continue on other workers" in second.output
    run.wait_until(lambda: "is lost" in notes(run, "worker_lost"), "the loss of the killed worker")

    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 0, first.output
    assert "has left emulated" in first.output
    run.wait_until(lambda: notes(run, "worker_left") != "", "the exit of the preempted worker")
    left = len(run.metrics("step"))
    run.wait_until(lambda: len(run.metrics("step")) > left + 1, "steps without them")

    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    assert "restarting it" not in run.output
    joined = {row["name"] for row in run.metrics("process") if row["event"] == "joined"}
    assert joined == names
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == summary["steps"] * 8 * 4
    verified = areal("verify", str(run.folder))
    assert verified.wait() == 0, verified.output
    late = areal("worker", "--join", str(copy))
    assert late.wait() == 2
    assert "the run has ended, or this machine cannot reach it" in late.output


def notes(run, kind: str) -> str:
    return "\n".join(row["text"] for row in run.metrics("note") if row["note"] == kind)
