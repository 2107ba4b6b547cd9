"""A run that trains on the conversations of a client process, with one worker killed on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS, STEPS = 8, 5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@contextlib.contextmanager
def client(port: int, log: Path, *options: str):
    """The shipped client, until the block ends."""
    command = [sys.executable, str(CONFIGS / "agents" / "traffic_sum.py"), f"http://127.0.0.1:{port}", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_trains_on_live_conversations_with_a_killed_worker_and_missing_rewards(areal, tmp_path):
    port = free_port()
    run = areal(
        "train", str(CONFIGS / "traffic_sum.yaml"), f"groups_per_step={GROUPS}", f"num_steps={STEPS}",
        "warm_start.sft.steps=20", "warm_start.sft.threads=1", "metrics.report=false",
        f"rollout.workflow_options={{port: {port}, reward_timeout_s: 2, on_missing_reward: drop}}",
        "rollout.engine.num_slots=16", "rollout.queue_samples=16",
    )  # fmt: skip
    # The limit for stalls is minutes: that a wait for clients is none is tested in tests/controller/runtime.
    waits = f"rollout-0 waits for clients at http://127.0.0.1:{port}"

    def status():
        with contextlib.suppress(OSError, ValueError, AssertionError):
            return json.loads((run.folder / "status.json").read_text())
        return {}

    run.wait_until(lambda: waits in status().get("waits", []), "a wait for clients")
    log = tmp_path / "client.log"
    with client(port, log, "--users=6", "--max-terms=3", "--silent=0.25", "--patience-s=600", "--every=8"):
        run.wait_for_step(2)
        os.kill(run.pid_of("rollout"), signal.SIGKILL)
        family = run.family()
        assert run.wait() == 0, run.output
    assert run.output.count("restarting it") == 1
    summary = run.summary
    assert (summary["steps"], summary["audit"], summary["samples_consumed"]) == (STEPS, "clean", STEPS * GROUPS)
    processes = json.loads((run.folder / "status.json").read_text())["processes"]
    assert run.metrics("pulse"), "the counters below are of pulses"
    counted = {}
    for row in run.metrics("pulse"):  # counters of a restarted worker begin at 0: the largest value is compared
        for key, value in row["processes"].get("rollout-0", {}).get("counters", {}).items():
            counted[key] = max(counted.get(key, 0.0), value)
    assert counted["traffic_rewards"] > 0
    assert counted["traffic_missing_rewards"] > 0, "a quarter of the users are silent"
    assert counted["traffic_recorded"] <= counted["traffic_requests"]
    assert "rollout-0" in processes
    assert "too_few_scores" in json.dumps(summary), "conversations without a reward are dropped, and counted"
    assert not run.survivors(family, timeout_s=15)
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0, "the address is closed"
