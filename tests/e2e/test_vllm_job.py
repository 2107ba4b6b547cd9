"""One job with a real vLLM server behind its worker, which is killed.

That frozen servers and servers that refuse or hang in a load are replaced is proved with a process in the server's
place (tests/rollout/vllm/test_vllm_swaps.py), and that a server ends with its worker in test_sglang_job.py, which
starts its servers by the same code.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

NUM_STEPS, GROUPS, GROUP_SIZE = 6, 5, 4
FORKED = Path(__file__).parent / "forked_server"
"""In PYTHONPATH: a server starts in less processor time."""


def by_scratch() -> list[psutil.Process]:
    """Whatever runs with the scratch folder of a vLLM server, whatever its parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            if "areal_like-vl-" in process.environ().get("TMPDIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_job_outlives_its_server_and_leaves_no_process(areal, quickstart, short, vllm_python):
    before = by_scratch()
    run = areal(
        "train", quickstart, *short, f"num_steps={NUM_STEPS}", "warm_start=null", "filter_zero_signal=false",
        "sampling.max_new_tokens=16", "model.init.num_hidden_layers=1", "model.init.intermediate_size=64",
        f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}", "rollout.engine.kind=vllm",
        f"rollout.engine.python={vllm_python}", "rollout.engine.num_slots=24", "rollout.engine.vllm.probe=true",
        f"rollout.engine.vllm.environment={{PYTHONPATH: '{FORKED}'}}", "rollout.engine.vllm.control_timeout_s=300",
        "rollout.engine.vllm.max_restarts=9", "launch.startup_timeout_s=1200",
    )  # fmt: skip
    run.wait_for_step(1)
    servers = [process for process in by_scratch() if process not in before]
    assert servers
    front = next(process for process in servers if "vllm.entrypoints" in " ".join(process.cmdline()))
    os.kill(front.pid, signal.SIGKILL)
    assert run.survivors(servers, 15.0) == [], "a dead server left processes behind"
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["steps"] == NUM_STEPS
    assert run.summary["samples_consumed"] == NUM_STEPS * GROUPS * GROUP_SIZE
    words = "the server ended with signal SIGKILL; starting another with version"
    assert f"rollout-0: vLLM server: {words}" in run.output
    assert [process for process in by_scratch() if process not in before] == []
