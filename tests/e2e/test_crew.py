"""Rollout workers leave and join a real run: answers move on, nothing is used twice or lost."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytestmark = pytest.mark.e2e

TWO = ["rollout.num_workers=2", "rollout.engine.num_slots=32", "warm_start=null", "trainer.checkpoint.every_steps=100"]
"""What the model can do does not matter here."""


def assert_whole(run):
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == summary["steps"] * 12 * 4


def notes(run, kind):
    return [row["text"] for row in run.metrics("note") if row["note"] == kind]


def test_drained_worker_hands_over_and_an_added_one_is_taken_in(areal, quickstart, short):
    """As many steps as it takes: the run is stopped when the added worker has taken part."""
    run = areal("train", quickstart, *short, *TWO, "num_steps=2000")
    run.wait_for_step(2)
    drained = areal("drain", str(run.folder), "rollout-1")
    assert drained.wait() == 0, drained.output
    assert "has left" in drained.output
    refused = areal("drain", str(run.folder), "rollout-0")
    assert refused.wait() == 1
    assert "only rollout worker" in refused.output
    num_swaps = len(run.metrics("swap"))
    added = areal("add", str(run.folder))
    assert added.wait() == 0, added.output
    (name,) = [line.split()[-3] for line in added.output.splitlines() if line.endswith(" has joined")]
    assert name in ("rollout-1", "rollout-2"), "the lowest number that is free, once the drained process has ended"
    run.wait_until(
        lambda: [row["worker"] for row in run.metrics("swap")[num_swaps:]].count(name) > 2,
        "three versions loaded by the added worker",
    )
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 0, run.output
    assert "restarting it" not in run.output
    assert_whole(run)
    assert any("rollout-1" in text for text in notes(run, "worker_left"))


def test_notice_of_a_spot_machine_moves_running_answers_and_the_timeline_shows_it(areal):
    """On emulated GPUs, whose few slots are always taken: there is always an answer to be moved."""
    slow = ["emulation.speedup=20", "emulation.mean_tokens=2000", "rollout.engine.num_slots=4"]
    sizes = ["num_steps=6", "groups_per_step=12", "group_size=4", "metrics.report=false"]
    run = areal("train", "emulated", *slow, *sizes, "rollout.num_workers=2")
    run.wait_for_step(1)
    os.kill(run.pid_of("rollout", "rollout-1.json"), signal.SIGTERM)
    assert run.wait() == 0, run.output
    assert "rollout-1 is draining; its" in run.output
    assert "restarting it" not in run.output
    assert_whole(run)
    assert run.summary["steps"] == 6
    moves = notes(run, "migrated")
    assert all("from rollout-1 to rollout-0" in text for text in moves)
    events = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    instants = [event for event in events if event["ph"] == "i" and event["name"] == "migrated"]
    assert len(instants) == len(moves) > 0
    starts = {event["id"] for event in events if event["ph"] == "s" and event["name"].startswith("m")}
    ends = {event["id"] for event in events if event["ph"] == "f" and event["name"].startswith("m")}
    carried = [text for text in moves if not text.endswith(" with 0 tokens")]
    assert bool(starts & ends) == bool(carried), "an arrow from worker to worker for an answer that had begun"
