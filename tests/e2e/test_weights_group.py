"""Weights by a process group through a whole run: workers come and go, and nothing waits for them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

GROUP = ["trainer.weights.kind=distributed", "trainer.weights.group.gather_s=1", "rollout.num_workers=2"]


def test_versions_by_a_process_group_carry_a_run_and_a_killed_worker_does_not_hang_it(areal, quickstart, short):
    run = areal("train", quickstart, *short, *GROUP, "num_steps=400")
    run.wait_for_step(2)
    os.kill(run.pid_of("rollout", "rollout-0"), signal.SIGKILL)  # right after a step: its version is on its way
    run.wait_until(lambda: run.output.count("starting it again") == 1, "its loss")
    before = len(run.metrics("swap"))
    run.wait_until(
        lambda: {row["worker"] for row in run.metrics("swap")[before:]} == {"rollout-0", "rollout-1"},
        "versions in both workers",
    )
    log = run.folder / "logs" / "trainer.log"
    run.wait_until(lambda: len(generations(log)) >= 2, "a new group that serves both, the dead worker's successor too")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == summary["steps"] * 12 * 4
    assert "quarantined" not in run.output


def generations(log: Path) -> set[str]:
    """Numbers of the groups by which a version went to both workers."""
    return set(re.findall(r"went to rollout-0, rollout-1 by \S+\.weights\.(\d+) in", log.read_text()))
