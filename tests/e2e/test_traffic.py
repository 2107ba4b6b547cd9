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
GROUPS, STEPS = 8, 6
USERS = ["--users=6", "--max-terms=3", "--patience-s=600", "--every=8"]


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
        f"rollout.workflow_options={{port: {port}, reward_timeout_s: 5, on_missing_reward: drop}}",
        "rollout.engine.num_slots=16", "rollout.queue_samples=16",
    )  # fmt: skip
    # The limit for stalls is minutes: that a wait for clients is none is tested in tests/controller/runtime.
    waits = f"rollout-0 waits for clients at http://127.0.0.1:{port}"

    def status():
        with contextlib.suppress(OSError, ValueError, AssertionError):
            return json.loads((run.folder / "status.json").read_text())
        return {}

    run.wait_until(lambda: waits in status().get("waits", []), "a wait for clients")
    first = ["--silent=0", "--conversations=32"]  # at most four steps, so that the run does not end before the kill
    with client(port, tmp_path / "first.log", *USERS, *first):
        run.wait_for_step(1)
    os.kill(run.pid_of("rollout"), signal.SIGKILL)
    with client(port, tmp_path / "second.log", *USERS, "--silent=0.25"):
        run.wait_until(lambda: run.output.count("restarting it") == 1, "a restart")
        family = run.family()
        assert run.wait() == 0, run.output
    summary = run.summary
    assert (summary["steps"], summary["audit"], summary["samples_consumed"]) == (STEPS, "clean", STEPS * GROUPS)
    assert summary["dropped_by_reason"]["too_few_scores"] > 0, "conversations without a reward are no zeros"
    counted: dict[str, float] = {}
    for row in run.metrics("pulse"):  # counters of a restarted worker begin at 0: the largest value counts
        for key, value in row["processes"].get("rollout-0", {}).get("counters", {}).items():
            counted[key] = max(counted.get(key, 0.0), value)
    assert counted["traffic_rewards"] >= GROUPS
    assert counted["traffic_missing_rewards"] > 0
    assert 0 < counted["traffic_recorded"] <= counted["traffic_requests"]
    assert not run.survivors(family, timeout_s=15)
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0, "the address is closed"
