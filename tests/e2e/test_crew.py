"""Rollout workers leave and join a real run: answers move on, nothing is used twice or lost."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any
from urllib.request import Request, urlopen

import pytest

from controller.dashboard.access import TOKEN_HEADER

pytestmark = pytest.mark.e2e

TWO = ["rollout.num_workers=2", "rollout.engine.num_slots=32", "warm_start=null", "trainer.checkpoint.every_steps=100"]
"""What the model can do does not matter here."""
LONG_S = 600.0
"""Only a bound on a hang."""


def assert_whole(run):
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == summary["steps"] * 12 * 4


def notes(run, kind):
    return [row["text"] for row in run.metrics("note") if row["note"] == kind]


@pytest.fixture
def act(areal, runs_dir):
    """Perform an action of the dashboard on a run; returns its lines. The dashboard is the real command."""
    token = "a-token-of-enough-signs"
    server = areal("dashboard", str(runs_dir), "--port", "0", "--token", token)
    address: list[str] = []

    def perform(run, action: str, **body: str) -> dict[str, Any]:
        if not address:
            server.wait_until(lambda: "Ctrl-C" in server.output, "the dashboard's address")
            address.extend(re.findall(r"http://127\.0\.0\.1:\d+", server.output))
        url = f"{address[0]}/run/{run.folder.name}/actions/{action}"
        headers = {"Content-Type": "application/json", TOKEN_HEADER: token}
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=LONG_S) as answer:
            return json.load(answer)

    return perform


def test_drained_worker_hands_over_and_an_added_one_is_taken_in(areal, act, quickstart, short):
    """As many steps as it takes: the run is stopped when the added worker has taken part. Half of the commands are
    given in the dashboard, which performs them on the running job.
    """
    run = areal("train", quickstart, *short, *TWO, "num_steps=2000")
    run.wait_for_step(2)
    drained = areal("drain", str(run.folder), "rollout-1")
    assert drained.wait() == 0, drained.output
    assert "has left" in drained.output
    refused = act(run, "drain", worker="rollout-0")
    assert not refused["is_done"]
    assert "only rollout worker" in "".join(refused["lines"])
    num_swaps = len(run.metrics("swap"))
    added = act(run, "add")
    assert added["is_done"], added
    (name,) = [line.split()[-5] for line in added["lines"] if line.endswith(" has joined the run")]
    assert name in ("rollout-1", "rollout-2"), "the lowest number that is free, once the drained process has ended"
    run.wait_until(
        lambda: [row["worker"] for row in run.metrics("swap")[num_swaps:]].count(name) > 2,
        "three versions loaded by the added worker",
    )
    saved = act(run, "checkpoint")
    assert saved["is_done"], saved
    assert list((run.folder / "checkpoints").iterdir())
    stopped = act(run, "stop")
    assert stopped["is_done"], stopped
    assert run.wait() == 0, run.output
    assert "restarting it" not in run.output
    assert_whole(run)
    assert any("rollout-1" in text for text in notes(run, "worker_left"))


@pytest.mark.thorough
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
