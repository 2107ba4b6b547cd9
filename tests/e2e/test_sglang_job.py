"""The quickstart's job with a real SGLang server behind its worker, and with that server and that worker killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

pytestmark = pytest.mark.e2e

NUM_STEPS = 14


def servers_of(run) -> list[psutil.Process]:
    """Every process of the run's SGLang servers."""
    fronts = [process for process in run.family() if "sglang.launch_server" in command_of(process)]
    return [process for front in fronts for process in (front, *front.children(recursive=True))]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_job_outlives_its_server_and_its_worker(areal, quickstart, short, sglang_python):
    run = areal(
        "train", quickstart, *short, f"num_steps={NUM_STEPS}", "rollout.engine.kind=sglang",
        f"rollout.engine.python={sglang_python}", "rollout.engine.num_slots=24", "launch.startup_timeout_s=600",
    )  # fmt: skip
    run.wait_for_step(2)
    (front,) = [process for process in servers_of(run) if "sglang.launch_server" in command_of(process)]
    os.kill(front.pid, signal.SIGKILL)
    run.wait_for_step(len(run.metrics("step")) + 3)
    served = servers_of(run)
    assert front.pid not in [process.pid for process in served]
    os.kill(run.pid_of("rollout"), signal.SIGKILL)
    assert run.survivors(served, 15.0) == [], "the killed worker left its server behind"
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["steps"] == NUM_STEPS
    log = (run.folder / "logs" / "rollout-0.log").read_text()
    assert "SGLang server: the server ended with signal SIGKILL; starting another with version" in log
    assert "rollout-0" in run.output
    assert servers_of(run) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollout.engine.sglang.arguments={enable-metric: true}", "SGLang 0.5.23 has no argument `enable-metric`"),
        ("rollout.engine.python=/nowhere/python", "there is no interpreter /nowhere/python"),
        ("rollout.engine.sglang.attach=[http://127.0.0.1:9]", "no SGLang server answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_server(areal, quickstart, short, sglang_python, given, said):
    run = areal(
        "train", quickstart, *short, "rollout.engine.kind=sglang", f"rollout.engine.python={sglang_python}", given
    )
    assert run.wait() == 2, run.output
    assert said in " ".join(run.output.split())
    assert "Traceback" not in run.output
    assert servers_of(run) == []
