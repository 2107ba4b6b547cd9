"""A job on emulated GPUs: the whole system runs, takes the time a roofline gives, and says that it is a model."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.e2e

SMALL = [
    "num_steps=4", "groups_per_step=4", "group_size=4", "rollout.num_workers=2", "emulation.speedup=40",
    "emulation.mean_tokens=2000", "metrics.report=false",
]  # fmt: skip


def test_emulated_job_runs_as_any_other_and_is_labelled(areal):
    run = areal("train", "emulated", *SMALL)
    assert run.wait() == 0, run.output
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["steps"] == 4
    assert "h800 for 1.5b, 40 times as fast" in summary["emulated"]
    steps = run.metrics("step")
    assert all(step["emulated_step_s"] > 0 for step in steps)
    last = run.metrics("pulse")[-1]["processes"]
    workers = [process["counters"] for name, process in last.items() if name.startswith("rollout")]
    assert len(workers) == 2
    assert all(counters["emulation_wakes"] > 0 for counters in workers)
    assert any(row["version"] > 0 for row in run.metrics("swap")), "versions travelled into running engines"
