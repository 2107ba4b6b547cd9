"""Weights through encrypted sockets, as deltas, one worker after another: nothing is lost, nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

STREAM = [
    "trainer.weights.kind=stream", "trainer.weights.delta={full_every: 4}", "trainer.weights.chunk_kb=16",
    "trainer.weights.fan_out=1", "trainer.weights.swap=rolling", "rollout.num_workers=2",
]  # fmt: skip


def assert_whole(run, steps):
    summary = run.summary
    assert summary["steps"] == steps
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == steps * 12 * 4


def left_behind(family):
    """What those processes own in shared memory."""
    pids = {process.pid for process in family}
    owners = Path("/dev/shm").glob("areal_like-*/owner.json")
    return [path for path in owners if any(f'"pid":{pid},' in path.read_text() for pid in pids)]


def test_streamed_deltas_and_rolling_swaps_carry_a_whole_run(areal, quickstart, short):
    run = areal("train", quickstart, *short, *STREAM)
    run.wait_for_step(2)
    family = run.family()
    assert run.wait() == 0, run.output
    assert_whole(run, 6)
    sizes = [row["publish_bytes"] for row in run.metrics("step")]
    assert len(sizes) == 6
    assert min(sizes) < max(sizes)
    swaps = run.metrics("swap")
    assert {row["worker"] for row in swaps} == {"rollout-0", "rollout-1"}
    assert max(row["version"] for row in swaps) == 6
    assert "quarantined" not in run.output
    assert not run.survivors(family, timeout_s=10)
    assert not left_behind(family)


def test_workers_killed_while_weights_travel_are_replaced_and_catch_up(areal, quickstart, short):
    """With fan_out 1 one worker fetches from the other: whichever dies, the other gets its versions."""
    run = areal("train", quickstart, *short, *STREAM, "num_steps=400")
    run.wait_for_step(3)
    for number, name in enumerate(("rollout-0", "rollout-1"), start=1):
        os.kill(run.pid_of("rollout", name), signal.SIGKILL)  # right after a step: its version is on its way
        run.wait_until(lambda number=number: run.output.count("restarting it") == number, "its loss")
        before = len(run.metrics("swap"))
        run.wait_until(
            lambda name=name, before=before: any(row["worker"] == name for row in run.metrics("swap")[before:]),
            f"a version in the new {name}",
        )
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 0, run.output
    assert_whole(run, run.summary["steps"])
