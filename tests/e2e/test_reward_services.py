"""Runs with several reward services, and with services they did not start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
def test_a_run_with_two_services_goes_on_when_one_is_gone_for_good(areal, quickstart, short):
    run = areal("train", quickstart, *short, "reward.num_services=2", "reward.max_restarts=0", "num_steps=4000")
    run.wait_for_step(2)
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "services.reward", "status", str(run.folder), "--timeout-s", "250"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    assert shown.count("scorers    running_sum@") == 2
    os.kill(run.pid_of("services.reward", "reward-0"), signal.SIGKILL)
    run.wait_until(lambda: "the other reward services continue" in run.output, "the loss of a service")
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + 3)
    run.process.terminate()
    assert run.wait() == 0, run.output
    assert run.summary["audit"] == "clean"
    assert run.summary["samples_consumed"] == run.summary["steps"] * 12 * 4


def test_a_run_scores_at_services_that_stand_alone_and_leaves_them_running(areal, quickstart, short, tmp_path):
    config = tmp_path / "rewards.yaml"
    config.write_text("reward: {scorers: [{kind: running_sum}]}\n")
    services = [serve(config, tmp_path / f"{name}.address") for name in "ab"]
    try:
        addresses = [address_of(tmp_path / f"{name}.address") for name in "ab"]
        run = areal("train", quickstart, *short, f"reward.addresses=[{', '.join(addresses)}]")
        run.wait_for_step(2)
        services[0].kill()
        assert run.wait() == 0, run.output
        assert f"scoring at {addresses[0]}: running_sum@" in run.output
        assert run.summary["audit"] == "clean"
        assert run.summary["samples_consumed"] == 6 * 12 * 4
        assert services[1].poll() is None, "a shared service outlives a run"
        gone = areal("train", quickstart, *short, f"reward.addresses=[{addresses[0]}]")
        assert gone.wait() == 2
        assert f"no reward service at {addresses[0]}" in gone.output
        other = areal(
            "train",
            quickstart,
            *short,
            f"reward.addresses=[{addresses[1]}]",
            "reward.scorers.0={kind: format, options: {must_contain: [x]}}",
        )
        assert other.wait() == 2
        assert f"`format` is not a scorer of the reward service at {addresses[1]}" in other.output
    finally:
        for service in services:
            service.terminate()
            service.wait(300.0)


def serve(config: Path, out: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "services.reward", "serve", "--config", str(config)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}, stdout=file,
        )  # fmt: skip


def address_of(out: Path) -> str:
    give_up_s = time.monotonic() + 60.0
    while not out.read_text():
        assert time.monotonic() < give_up_s, "the service did not come up"
        time.sleep(0.05)
    return out.read_text().strip()
