"""An engine thread that hangs while its worker's heartbeats go on."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

HANG = """
import os, time
from pathlib import Path

from rollout.engine.core import GenerationCore
from rollout.workflow import SingleTurn

step = GenerationCore.step


def hang_indefinitely(core):
    if Path({flag!r}).exists():
        Path({flag!r}).unlink()
        while True:
            time.sleep(0.1)
    return step(core)


GenerationCore.step = hang_indefinitely


class Hanging(SingleTurn):
    pass
"""


def test_worker_whose_engine_hangs_is_replaced_and_its_stacks_are_in_the_log(areal, quickstart, short, tmp_path):
    flag = tmp_path / "hang"
    flag.touch()
    (tmp_path / "hanging.py").write_text(HANG.format(flag=str(flag)))
    settings = ["rollout.workflow=hanging:Hanging", "rollout.engine.stall_timeout_s=20", "warm_start=null"]
    settings += ["num_steps=2", "sampling.max_new_tokens=24"]  # a model with random weights uses them all
    run = areal("train", quickstart, *short, *settings, "name=hang")
    assert run.wait() == 0, run.output
    assert not flag.exists()
    log = (run.folder / "logs" / "rollout-0.log").read_text()
    assert "the engine thread has made no progress for 20 s" in log
    assert "hang_indefinitely" in log
    assert run.summary["audit"] == "clean"
    assert run.summary["samples_consumed"] == 2 * 12 * 4
