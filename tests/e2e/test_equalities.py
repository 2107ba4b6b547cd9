"""Runs that must end with the same weights, bit for bit: sync, and bound 0 with each of its processes killed once;
sync with online DPO, killed and not.

python -m benchmarks.equalities compares all four combinations over several seeds.
"""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.equalities import JOB, MODES
from benchmarks.objectives.quickstarts import JOBS
from controller.runs.replay.tensors import digests_in

pytestmark = pytest.mark.e2e


def test_bound_0_with_trainer_worker_and_controller_killed_ends_with_the_weights_of_sync(
    areal, quickstart, own_forkserver
):
    sync = areal("train", quickstart, *JOB, *MODES["sync"])
    assert sync.wait() == 0, sync.output
    assert (sync.summary["audit"], sync.summary["staleness_max"]) == ("clean", 0)
    run = areal("train", quickstart, *JOB, *MODES["bound 0"])
    run.wait_for_step(2)
    os.kill(run.pid_of("trainer"), signal.SIGKILL)
    run.wait_for_step(4)
    os.kill(run.pid_of("rollout", "rollout-0"), signal.SIGKILL)
    run.wait_for_step(5)
    family = run.family()
    assert len(family) >= 4
    os.kill(run.process.pid, signal.SIGKILL)
    assert not run.survivors(family, timeout_s=60)
    own_forkserver()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert (resumed.summary["audit"], resumed.summary["staleness_max"]) == ("clean", 0)
    assert resumed.summary["trainer_restarts"] >= 1
    assert digests_in(run.folder / "final") == digests_in(sync.folder / "final")


@pytest.mark.thorough
def test_online_dpo_killed_and_resumed_ends_with_the_weights_of_a_run_that_was_not(areal, quickstart, own_forkserver):
    words = [*JOB, *MODES["sync"], *JOBS["online_dpo"]]
    whole = areal("train", quickstart, *words)
    assert whole.wait() == 0, whole.output
    assert any(row.get("dpo_pairs", 0.0) > 0 for row in whole.metrics("step")), "no pair: nothing was trained"
    cut = areal("train", quickstart, *words)
    cut.wait_for_step(4)
    family = cut.family()
    os.kill(cut.process.pid, signal.SIGKILL)
    assert not cut.survivors(family, timeout_s=60)
    assert not (cut.folder / "final").exists()
    own_forkserver()
    resumed = areal("resume", str(cut.folder))
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary["audit"] == "clean"
    assert digests_in(cut.folder / "final") == digests_in(whole.folder / "final")
