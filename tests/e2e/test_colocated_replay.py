"""A resume that replays several steps: the real trainer and the real engine never use the shared devices together."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def spans(run_dir: Path, process: str, since_s: float, *names: str) -> list[tuple[int, int, str]]:
    """Begin, end and name of spans since then, in microseconds and in order, from the timeline of one process."""
    lines = (run_dir / "logs" / f"{process}.trace.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    found = [(event["ts"], event["ts"] + event.get("dur", 0), event["name"]) for event in events if "ts" in event]
    return sorted(one for one in found if one[2] in names and one[0] > since_s * 1e6)


def holdings(run_dir: Path, process: str, since_s: float, first: str) -> list[tuple[float, float]]:
    """From the begin of `first`, which takes memory, to the end of the release after it."""
    found: list[tuple[float, float]] = []
    begin: float | None = None
    for begin_us, end_us, name in spans(run_dir, process, since_s, first, "release_memory"):
        if name == first:
            begin = begin_us if begin is None else begin
        elif begin is not None:
            found.append((begin, end_us))
            begin = None
    return found if begin is None else [*found, (begin, math.inf)]


@pytest.mark.thorough
def test_after_a_resume_that_replays_engine_and_trainer_never_hold_the_devices_together(
    areal, quickstart, short, gate, own_forkserver
):
    run = areal(
        "train", quickstart, *short, *gate.after_step(4, mode="sync"), "mode=sync", "placement=colocated",
        "num_steps=8", "eval.at_start=false",
        "metrics.report=false", "trainer.checkpoint.every_steps=0", "warm_start=null",
    )  # fmt: skip
    run.wait_for_step(4)
    family = run.family()
    os.kill(run.process.pid, signal.SIGKILL)
    assert not run.survivors(family, timeout_s=15)
    gate.open()
    own_forkserver()
    resumed_s = time.time()
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary["audit"] == "clean"
    trainer = holdings(run.folder, "trainer", resumed_s, "take_memory")
    engine = holdings(run.folder, "rollout-0", resumed_s, "load_version")
    assert len(trainer) >= 7, "steps are replayed one by one, and trained after them"
    assert len(engine) >= 2
    for begin_us, end_us in trainer:
        assert not [one for one in engine if one[0] < end_us and begin_us < one[1]], "both hold memory"
