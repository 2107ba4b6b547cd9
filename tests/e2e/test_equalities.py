"""Runs that must end with the same weights, bit for bit: sync, and bound 0 with each of its processes killed once.

python -m benchmarks.equalities compares all four combinations over several seeds.
"""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.equalities import JOB, MODES
from controller.runs.replay.tensors import digests_in

pytestmark = pytest.mark.e2e


def test_bound_0_with_trainer_worker_and_controller_killed_ends_with_the_weights_of_sync(
    areal, quickstart, own_forkserver
):
    sync = areal("train", quickstart, *JOB, *MODES["sync"])
    assert sync.wait() == 0, sync.output
    run = areal("train", quickstart, *JOB, *MODES["bound 0"])
    run.wait_for_step(2)
    os.kill(run.pid_of("trainer"), signal.SIGKILL)
    run.wait_for_step(4)
    os.kill(run.pid_of("rollout", "rollout-0"), signal.SIGKILL)
    run.wait_for_step(5)
    family = run.family()
    os.kill(run.process.pid, signal.SIGKILL)
    assert not run.survivors(family, timeout_s=60)
    own_forkserver()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary["audit"] == "clean"
    assert resumed.summary["trainer_restarts"] >= 1
    assert digests_in(run.folder / "final") == digests_in(sync.folder / "final")
