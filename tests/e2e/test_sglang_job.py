"""One job with a real SGLang server behind its worker, and everything that may die in it killed, one after the other.

A server takes long to start, so all claims share the one run: its server killed, its worker killed, and controller and
worker killed together while the next server is still starting. That a frozen server is found and replaced is proved
with a process in its place (tests/rollout/sglang/test_sglang_swaps.py). Its weights travel as deltas through
encrypted sockets, and each load is proved by the server's own checksums.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

NUM_STEPS = 18
GROUPS, GROUP_SIZE = 5, 4
FORKED = Path(__file__).parent / "forked_server"
"""In PYTHONPATH: a server starts in half the processor time."""


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def fronts_of(run) -> list[psutil.Process]:
    """The first process of each SGLang server of the run: the child of a guard."""
    found = [process for process in run.family() if "sglang.launch_server" in command_of(process)]
    guards = {process.pid for process in found if "guard.py" in command_of(process)}
    return [process for process in found if parent_of(process) in guards]


def parent_of(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def servers_of(run) -> list[psutil.Process]:
    """Every process of the run's SGLang servers."""
    return [process for front in fronts_of(run) for process in (front, *front.children(recursive=True))]


def workers_of(front: psutil.Process) -> list[psutil.Process]:
    """The processes that a server started to stay: a start also asks short-lived tools about the machine."""
    try:
        return [child for child in front.children() if "sglang::" in command_of(child)]
    except psutil.NoSuchProcess:
        return []


def servers_by_scratch(worker: int) -> list[psutil.Process]:
    """Whatever runs with the scratch folder of that worker's servers, whatever its parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"areal_like-sg-{worker}-" in process.environ().get("TMPDIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def next_server(run, before: psutil.Process) -> psutil.Process:
    run.wait_until(lambda: any(front.pid != before.pid for front in fronts_of(run)), "another server")
    return next(front for front in fronts_of(run) if front.pid != before.pid)


def go_on(run, num_steps: int) -> None:
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + num_steps)


@pytest.mark.thorough
def test_a_job_outlives_whatever_dies_in_it(areal, quickstart, short, sglang_python):
    run = areal(
        "train", quickstart, *short, f"num_steps={NUM_STEPS}", "trainer.checkpoint.every_steps=4",
        "warm_start=null", "filter_zero_signal=false", "sampling.max_new_tokens=16",  # what it learns is no matter here
        "model.init.hidden_size=32", "model.init.num_hidden_layers=1", "model.init.intermediate_size=64",
        f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}",
        "trainer.weights.kind=stream", "trainer.weights.delta={full_every: 4}",
        "rollout.engine.kind=sglang", f"rollout.engine.python={sglang_python}", "rollout.engine.num_slots=24",
        f"rollout.engine.sglang.environment={{PYTHONPATH: '{FORKED}'}}",
        "rollout.engine.sglang.checksums=true",
        "rollout.engine.sglang.control_timeout_s=300", "rollout.engine.sglang.max_restarts=9",
        "launch.startup_timeout_s=600",
    )  # fmt: skip
    run.wait_for_step(2)
    (first,) = fronts_of(run)
    family = servers_of(run)
    os.kill(first.pid, signal.SIGKILL)
    second = next_server(run, first)
    assert run.survivors(family, 15.0) == [], "a dead server left processes behind"
    go_on(run, 3)
    assert fronts_of(run) == [second]

    family = servers_of(run)
    worker = run.pid_of("rollout")
    os.kill(worker, signal.SIGKILL)
    assert run.survivors(family, 15.0) == [], "the killed worker left its server behind"
    run.wait_until(lambda: any(workers_of(front) for front in fronts_of(run)), "the next worker's server")

    family, worker = run.family(), run.pid_of("rollout")
    scheduler_starts = [child for front in fronts_of(run) for child in workers_of(front)]
    assert scheduler_starts, "too late: nothing is starting any more"
    for child in scheduler_starts:
        child.suspend()  # it is still starting when everybody else dies
    os.kill(run.process.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    run.process.wait(300.0)
    assert run.survivors([*family, *scheduler_starts, *servers_by_scratch(worker)], 15.0) == []
    assert servers_by_scratch(worker) == [], "a server that was starting outlived everybody"
    words = "the server ended with signal SIGKILL; starting a new server with version"
    assert f"rollout-0: SGLang server: {words}" in run.output
    assert "rollout-0: ended with signal SIGKILL; restarting it" in run.output

    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary["audit"] == "clean"
    assert resumed.summary["steps"] == NUM_STEPS
    assert resumed.summary["samples_consumed"] == NUM_STEPS * GROUPS * GROUP_SIZE
    with sqlite3.connect(run.folder / "ledger.sqlite") as db:
        rows = [text for (text,) in db.execute("SELECT text FROM incidents ORDER BY seq")]
    killed, lost = (
        next(at for at, text in enumerate(rows) if words in text)
        for words in ("the server ended with signal SIGKILL", "rollout-0 is lost")
    )
    assert killed < lost
