"""A cluster whose nodes have addresses of their own: two network namespaces, encryption on, weights by stream."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ray_nodes import RayNodes

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'areal-like[ray]'"),
]

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = str(REPOSITORY / "configs" / "cluster.yaml")
HOSTS = {"arl-head": "10.231.77.1", "arl-work": "10.231.77.2"}


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def two_networks() -> Iterator[RayNodes]:
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    cluster = None
    made = [f"{name}-{os.getpid()}" for name in HOSTS]
    head, work = made
    pairs = [f"{name}={address}" for name, address in zip(made, HOSTS.values(), strict=True)]
    try:
        for name in made:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "arl0", "netns", head, "type", "veth", "peer", "name", "arl0", "netns", work)
        for name, address in zip(made, HOSTS.values(), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "arl0")
            ip("-n", name, "link", "set", "arl0", "up")
        cluster = RayNodes(pairs)
        cluster.head(num_cpus=2, resources={"first": 4}, namespace=head, takes_jobs=False)
        cluster.add(num_cpus=2, resources={"second": 4}, namespace=work)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def swapped(folder: Path) -> set[str]:
    """Workers that have loaded a version which this run published in its course."""
    if not (metrics := folder / "metrics.jsonl").is_file():
        return set()
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if '"swap"' in line and line.endswith("}")]
    return {row["worker"] for row in rows if row["kind"] == "swap" and row["version"] > 0}


@pytest.mark.thorough
def test_job_across_two_networks_is_encrypted_and_streams_its_weights(two_networks, runs_dir, tmp_path, short):
    head = two_networks.within(f"arl-head-{os.getpid()}")
    words = [
        "launch.ray.trainer={cpus: 0.5, resources: {second: 1}}",
        "launch.ray.reward={cpus: 0.5, resources: {second: 1}}",
        "launch.ray.rollout={cpus: 0.5, resources: {first: 1}}",
        "rollout.num_workers=2", "name=networks", "num_steps=4000", "warm_start=null", "sampling.max_new_tokens=24",
        "model.init.hidden_size=32", "model.init.num_hidden_layers=1", "model.init.intermediate_size=64",
    ]  # fmt: skip
    log, folder = tmp_path / "command.log", runs_dir / "networks"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [*head, sys.executable, "-P", "-m", "controller", "train", CLUSTER, *short, *words, f"runs_dir={runs_dir}"],
            env={**two_networks.environment, "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 900.0
        while swapped(folder) != {"rollout-0", "rollout-1"}:
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        run.terminate()
        assert run.wait(900.0) == 0, log.read_text()
    finally:
        run.kill()
        run.wait(300.0)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["audit"] == "clean"
    spec = json.loads((folder / "processes" / "trainer.json").read_text())
    assert spec["hub_address"].startswith(f"tcp://{HOSTS['arl-head']}:")
    assert spec["reward_addresses"][0].startswith(f"tcp://{HOSTS['arl-work']}:")
    assert spec["curve_dir"]
    assert spec["settings"]["weights"]["kind"] == "stream"
    assert two_networks.placement_groups(f"arl-head-{os.getpid()}") == []
