"""The job walk on a real Ray cluster of several nodes, as docs/clusters.md types it: nodes die and join, jobs stop.

Most of what these tests cost is the start of processes, so one long job is the one whose nodes die and the one that is
stopped. Its scorer waits: what is waited for otherwise would cost the more processor time the slower the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_nodes import RAY, RayNodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.thorough("nodes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'areal-like[ray]'"),
]

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = str(REPOSITORY / "configs" / "cluster.yaml")
STAYS = [
    "launch.ray.trainer={cpus: 0.5, resources: {stays: 1}}", "launch.ray.reward={cpus: 0.5, resources: {stays: 1}}",
    "launch.ray.rollout={cpus: 0.5, strategy: SPREAD, resources: {comes_and_goes: 1}}",
]  # fmt: skip
"""Trainer and rewards on the head, rollout workers on the other nodes."""
TRAINS = "launch.ray.trainer={cpus: 0.5, resources: {trains: 1}}"
"""The trainer on one of those too."""
GROUPS, GROUP_SIZE = 4, 4
FEW = [
    "warm_start=null", "rollout.engine.num_slots=32", "trainer.checkpoint.every_steps=2", "sampling.max_new_tokens=24",
    "model.init.hidden_size=32", "model.init.num_hidden_layers=1", "model.init.intermediate_size=64",
    "filter_zero_signal=false", f"groups_per_step={GROUPS}", f"group_size={GROUP_SIZE}",
]  # fmt: skip
WAITING = """
import time

def score(row, response, **info):
    time.sleep(0.1)
    return len(response) % 2
"""
"""A user's module. A step takes more than a second, nearly all of it idle."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes()
    try:
        cluster.head(num_cpus=4, resources={"stays": 8})
        for more in ({"trains": 1}, {}):
            cluster.add(num_cpus=1, resources={"comes_and_goes": 1, **more})
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def in_cluster(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    for key, value in nodes.environment.items():
        monkeypatch.setenv(key, value)
    return nodes


def losses(run):
    """What was said of each process that was lost."""
    return [row for row in run.metrics("process") if row["event"] == "lost"]


def pid_of_seated(module: str) -> int:
    """Process id of the only one of its kind that sits on a node of this machine."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        is_seated = any("areal_like-seat-" in word for word in line)
        if is_seated and "-m" in line and line[line.index("-m") + 1] == module:
            found.append(process.info["pid"])
    (pid,) = found
    return pid


def ray_job(nodes: RayNodes, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RAY, "job", *words], env=job_environment(nodes), cwd=REPOSITORY, capture_output=True, text=True, timeout=900.0,
        check=False,
    )  # fmt: skip


def job_environment(nodes: RayNodes) -> dict[str, str]:
    """Variables of a command about the cluster's jobs."""
    return {**nodes.environment, "RAY_API_SERVER_ADDRESS": nodes.dashboard, "RAY_ADDRESS": nodes.dashboard}


@pytest.fixture
def submit(in_cluster: RayNodes, run_class: type, runs_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """submit(ID, COMMAND, ...): `ray job submit` that prints what the job prints, with WAITING where modules are found.

    Without --working-dir: all nodes of this machine unpack it to one folder, where one of them may remove it again.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "waiting.py").write_text(WAITING)
    started = []

    class Job(run_class):
        def _start(self, arguments: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
            with self.log_path.open("wb") as log:
                return subprocess.Popen(
                    [RAY, "job", "submit", *arguments], cwd=cwd, env=environment | job_environment(in_cluster),
                    stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip

    def start(name: str, *words: str) -> Any:
        entry = ["--", sys.executable, "-m", "controller", *words, f"runs_dir={runs_dir}"]
        found = json.dumps({"env_vars": {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}})
        job = Job([f"--submission-id={name}", "--runtime-env-json", found, *entry], folder, runs_dir)
        started.append(job.process)
        return job

    yield start
    for process in started:
        process.kill()
        process.wait(300.0)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.5)


def test_validate_says_who_sits_where_and_refuses_what_cannot_fit(in_cluster, areal):
    fits = areal("validate", CLUSTER, *STAYS)
    assert fits.wait() == 0, fits.output
    seats = [line for line in fits.output.splitlines() if "rollout-0" in line or "rollout-1" in line]
    assert len(seats) == 2, fits.output
    assert any("controller, trainer, reward" in line for line in fits.output.splitlines())
    small = areal("validate", CLUSTER, *STAYS, "rollout.num_workers=5")
    assert small.wait() == 2, small.output
    assert "pool rollout needs 5 places of CPU 0.5, comes_and_goes 1, but there is room for only 2" in small.output
    assert "the whole cluster lacks comes_and_goes 3" in small.output


def test_submitted_job_runs_in_its_seats_and_its_exit_status_is_the_runs(in_cluster, runs_dir, short):
    words = [*short, *FEW, *STAYS, "rollout.num_workers=1", "name=submitted", f"runs_dir={runs_dir}"]
    entry = ["submit", "--working-dir", ".", "--", sys.executable, "-m", "controller", "train", "configs/cluster.yaml"]
    done = ray_job(in_cluster, *entry, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = runs_dir / "submitted"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["audit"]) == (6, "clean")
    for name in ("trainer", "reward", "rollout-0"):
        assert (folder / "logs" / f"{name}.log").read_text(), f"the log of {name} came home"
    spec = json.loads((folder / "processes" / "rollout-0.json").read_text())
    assert spec["curve_dir"], "off loopback messages are encrypted"
    assert (folder / "final" / "config.json").is_file()
    assert in_cluster.placement_groups() == []
    refused = ray_job(in_cluster, *entry, "num_steps=0", f"runs_dir={runs_dir}")
    assert refused.returncode != 0
    assert "num_steps: the value must be greater than 0" in refused.stdout + refused.stderr


def test_nodes_that_die_are_named_one_that_joins_takes_their_processes_and_a_stopped_job_saves(
    in_cluster, submit, areal, short
):
    run = submit(
        "to-stop", "train", CLUSTER, *short[1:], *FEW, *STAYS, TRAINS, "num_steps=4000", "rollout.max_restarts=2",
        "reward.scorers=[{kind: 'waiting:score'}]",
    )  # fmt: skip
    run.wait_for_step(2)
    os.kill(pid_of_seated("trainer"), signal.SIGKILL)
    run.wait_until(lambda: run.output.count("the trainer restarts from version") == 1, "the trainer's next life")
    assert losses(run)[0]["reason"] == "ended with signal SIGKILL"
    in_cluster.nodes[-1].kill_raylet()
    run.wait_until(lambda: len(losses(run)) == 2, "the loss of a rollout worker")
    assert "is no longer in the Ray cluster" in losses(run)[1]["reason"]
    run.wait_for_step(max(row["step"] for row in run.metrics("step")) + 2)
    said = len(run.output)
    in_cluster.nodes[-2].kill_raylet()
    missing = "trainer waits for free resources on a node (CPU 0.5, trains 1), at most 900 s (launch.ray.node_wait_s)"
    run.wait_until(lambda: missing in run.output[said:], "what the trainer waits for")
    run.wait_until(lambda: len(losses(run)) == 4, "the loss of the other rollout worker")
    assert {row["name"] for row in losses(run)} == {"trainer", "rollout-0", "rollout-1"}
    assert all("is no longer in the Ray cluster" in row["reason"] for row in losses(run)[2:])
    step, swaps = max(row["step"] for row in run.metrics("step")), len(run.metrics("swap"))
    in_cluster.add(num_cpus=2, resources={"comes_and_goes": 3, "trains": 1})
    run.wait_until(
        lambda: {row["worker"] for row in run.metrics("swap")[swaps:]} == {"rollout-0", "rollout-1"},
        "versions in both workers",
    )
    run.wait_for_step(step + 2)
    added = areal("add", str(run.folder))
    assert added.wait() == 0, added.output
    assert "rollout-2 has joined" in added.output
    assert ray_job(in_cluster, "stop", "--no-wait", "to-stop").returncode == 0
    until(lambda: json.loads((run.folder / "state.json").read_text())["status"] != "running", "the end")
    until(lambda: in_cluster.placement_groups() == [], "free places")
    assert json.loads((run.folder / "state.json").read_text())["status"] == "stopped"
    summary = run.summary
    assert summary["audit"] == "clean"
    assert summary["samples_consumed"] == summary["steps"] * GROUPS * GROUP_SIZE
    assert summary["trainer_restarts"] == 2
    assert (run.folder / "checkpoints" / f"step_{summary['steps']:06d}").is_dir()


def test_stranger_without_the_token_learns_how_to_get_in(nodes, areal, monkeypatch):
    for key, value in nodes.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    run = areal("train", CLUSTER, *STAYS)
    assert run.wait() == 2, run.output
    assert "RAY_AUTH_TOKEN_PATH" in run.output
    assert "Traceback" not in run.output
