"""A run with `--keep-alive` survives the death of its controller."""

from __future__ import annotations

import json
import os
import signal

import pytest

from controller.run_folder.restarts import read_restarts

pytestmark = pytest.mark.e2e


def test_run_whose_controller_is_killed_ends_without_anybody(areal, quickstart, short, gate):
    run = areal("train", quickstart, "--keep-alive", *short, *gate.after_step(2), "name=alive", "warm_start=null")
    run.wait_for_step(2)
    os.kill(json.loads((run.folder / "state.json").read_text())["controller_pid"], signal.SIGKILL)
    gate.open()
    assert run.wait() == 0, run.output
    assert "the controller was ended by signal SIGKILL; resuming in 2 s (--keep-alive)" in run.output
    (restart,) = read_restarts(run.folder)
    assert restart["step"] >= 2
    assert run.summary["steps"] == 6
    assert run.summary["audit"] == "clean"
    assert run.summary["samples_consumed"] == 6 * 12 * 4
