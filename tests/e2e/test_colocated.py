"""Engine and trainer on the same devices, in turns: the same results as apart, and a death in any phase is survived."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SYNC = [
    "mode=sync", "num_steps=3", "groups_per_step=4", "group_size=4", "rollout.engine.num_slots=1",
    "eval.at_start=false", "metrics.report=false",
]  # fmt: skip
"""One slot: a sample's numbers do not depend on which others ran concurrently."""


def weights_of(run) -> bytes:
    return (Path(run.folder) / "final" / "model.safetensors").read_bytes()


def test_a_colocated_run_ends_with_bit_equal_weights_and_releases_memory_at_every_step(areal, quickstart, short):
    apart = areal("train", quickstart, *short, *SYNC)
    assert apart.wait() == 0, apart.output
    together = areal("train", quickstart, *short, *SYNC, "placement=colocated")
    assert together.wait() == 0, together.output
    assert weights_of(together) == weights_of(apart)
    assert together.summary["audit"] == "clean"
    released = together.metrics("release")
    assert len(released) == 3
    assert all(row["num_bytes"] > 1e6 for row in released)
    assert not apart.metrics("release")
    trace = (together.folder / "trace.json").read_text()
    assert trace.count('"release_memory"') >= 6, "engine's and trainer's, in every step"
    assert '"take_memory"' in trace


@pytest.mark.thorough
def test_a_worker_killed_in_any_phase_of_a_colocated_run_holds_nobody_up(areal, quickstart, short):
    run = areal("train", quickstart, *short, "mode=sync", "placement=colocated", "num_steps=400", "eval.at_start=false")
    for step in (1, 3, 5):  # right after a step: at work, loading, or about to release
        run.wait_for_step(step + 1)
        os.kill(run.pid_of("rollout", "rollout-0"), signal.SIGKILL)
        run.wait_until(lambda step=step: run.output.count("restarting it") == (step + 1) // 2, "its loss")
        done = run.metrics("step")[-1]["step"]
        run.wait_for_step(done + 2)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["samples_consumed"] == run.summary["steps"] * 12 * 4
