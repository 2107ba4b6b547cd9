"""One job with a real vLLM server behind its worker, which is killed, stopped while it generates, made to refuse a
version, and stopped while it loads one.

A server takes long to start, so all claims share the one run. Each fault with exact oracles, with a process in the
server's place: tests/rollout/vllm/test_vllm_swaps.py. That a server ends with its worker: test_sglang_job.py, which
starts its servers by the same code.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

NUM_STEPS, GROUPS, GROUP_SIZE = 24, 5, 4
FAULTY = Path(__file__).parent / "faulty_vllm"
"""In PYTHONPATH: the server fails on demand, and starts in less processor time."""


def by_scratch(worker: int) -> list[psutil.Process]:
    """Whatever runs with the scratch folder of that worker's vLLM servers, whatever its parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"areal_like-vl-{worker}-" in process.environ().get("TMPDIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def front_of(run, before: list[psutil.Process]) -> psutil.Process:
    """The first process of the worker's server, once there is one that is not in `before`."""

    def fronts() -> list[psutil.Process]:
        found = by_scratch(run.pid_of("rollout"))
        return [one for one in found if one not in before and "vllm.entrypoints" in command_of(one)]

    run.wait_until(lambda: bool(fronts()), "a server")
    return fronts()[0]


def incident(run, words: str, count: int = 1) -> None:
    run.wait_until(lambda: run.output.count(words) >= count, words)


def go_on(run) -> None:
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + 2)


def test_a_job_outlives_its_server_and_leaves_no_process(areal, quickstart, short, vllm_python, tmp_path):
    variables = f"{{PYTHONPATH: '{FAULTY}', FAULTS: '{tmp_path}'}}"
    run = areal(
        "train", quickstart, *short, f"num_steps={NUM_STEPS}", "warm_start=null", "filter_zero_signal=false",
        "sampling.max_new_tokens=16", "model.init.num_hidden_layers=1", "model.init.intermediate_size=64",
        f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}", "rollout.engine.kind=vllm",
        f"rollout.engine.python={vllm_python}", "rollout.engine.num_slots=24", "rollout.engine.vllm.probe=true",
        f"rollout.engine.vllm.environment={variables}", "rollout.engine.vllm.control_timeout_s=300",
        "rollout.engine.vllm.stall_timeout_s=20", "rollout.engine.vllm.load_timeout_s=20",
        "rollout.engine.vllm.max_restarts=99", "launch.startup_timeout_s=1200",
    )  # fmt: skip
    run.wait_for_step(1)
    worker = run.pid_of("rollout")
    server = front_of(run, [])
    family = by_scratch(worker)
    server.kill()
    assert run.survivors(family, 15.0) == [], "a dead server left processes behind"
    incident(run, "the server ended with signal SIGKILL; starting a new server with version")
    go_on(run)

    stopped = front_of(run, family).children(recursive=True)
    for process in stopped:
        process.suspend()  # while it generates or loads; the front still answers
    run.wait_until(lambda: not run.survivors(stopped, 0.0), "the end of the stopped server")
    go_on(run)

    (tmp_path / "refuse").touch()
    incident(run, "vLLM server: the server rejected version")
    go_on(run)

    (tmp_path / "hang").touch()
    run.wait_until(lambda: not (tmp_path / "hang").exists(), "a load")
    loading = by_scratch(worker)
    run.wait_until(lambda: not run.survivors(loading, 0.0), "the end of the server that loads")

    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["steps"] == NUM_STEPS
    assert run.summary["samples_consumed"] == NUM_STEPS * GROUPS * GROUP_SIZE
    assert by_scratch(worker) == []
