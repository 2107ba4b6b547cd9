"""Weights by a process group through a whole run: workers come and go, and nothing waits for them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

GROUP = [
    "trainer.weights.kind=distributed", "trainer.weights.group.gather_s=1", "rollout.num_workers=2",
    "trainer.checkpoint.every_steps=2",
]  # fmt: skip


def test_versions_by_a_process_group_carry_a_run_and_neither_a_killed_worker_nor_a_killed_trainer_hangs_it(
    areal, quickstart, short
):
    run = areal("train", quickstart, *short, *GROUP, "num_steps=400")
    run.wait_for_step(2)
    os.kill(run.pid_of("rollout", "rollout-0"), signal.SIGKILL)  # right after a step: its version is on its way
    run.wait_until(lambda: run.output.count("restarting it") == 1, "its loss")
    before = len(run.metrics("swap"))
    run.wait_until(
        lambda: {row["worker"] for row in run.metrics("swap")[before:]} == {"rollout-0", "rollout-1"},
        "versions in both workers",
    )
    log = run.folder / "logs" / "trainer.log"
    run.wait_until(lambda: len(generations(log)) >= 2, "a new group that serves both, the dead worker's successor too")
    os.kill(run.pid_of("trainer"), signal.SIGKILL)  # the root of the group: its members wait at the other ends
    run.wait_until(lambda: "the trainer restarts from version" in run.output, "its restart")
    length = len(log.read_text())
    run.wait_until(lambda: generations(log, length) != set(), "a group of the new trainer that serves both")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["trainer_restarts"] == 1
    assert summary["samples_consumed"] == summary["steps"] * 12 * 4
    assert "quarantined" not in run.output


def generations(log: Path, start: int = 0) -> set[str]:
    """Numbers of the groups by which a version went to both workers, found in the log from `start` on."""
    return set(
        re.findall(r"to rollout-0, rollout-1 through the process group \S+\.weights\.(\d+) in", log.read_text()[start:])
    )
