"""A whole job whose verdicts come from an environment, with everything under it killed in mid-episode."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from areal_like.process import command_words

pytestmark = pytest.mark.e2e

GUESS = str(Path(__file__).resolve().parents[2] / "configs" / "guess_number.yaml")
SMALL = [
    "warm_start=null", "num_steps=6", "groups_per_step=4", "group_size=4", "rollout.engine.num_slots=8",
    "data.train.limit=64", "eval.every_steps=0", "metrics.report=false", "metrics.display=plain",
]  # fmt: skip


def is_environment(process: psutil.Process) -> bool:
    try:
        return "services.environment.host" in command_words(process)
    except psutil.Error:
        return False


def test_episodes_outlive_their_processes_their_service_and_their_worker(areal):
    run = areal("train", GUESS, *SMALL)
    run.wait_for_step(1)
    family = run.family()
    environments = [process for process in family if is_environment(process)]
    assert environments
    for process in environments:
        process.kill()
    run.wait_for_step(2)
    for module in ("services.reward", "rollout"):
        os.kill(run.pid_of(module), signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert (run.summary["audit"], run.summary["steps"]) == ("clean", 6)
    assert run.summary["groups_dropped"] == 0
    assert run.summary["samples_consumed"] == 6 * 16
    assert not run.survivors(family, timeout_s=15)
    shown = areal("samples", str(run.folder), "--format", "jsonl", "--out", "-", "--limit", "all")
    assert shown.wait() == 0, shown.output
    rows = [json.loads(line) for line in shown.output.splitlines() if line.startswith("{")]
    assert len(rows) == 6 * 16
    assert all(row["components"]["turns"] <= 10 for row in rows)
