"""A Ray cluster of several nodes on this machine, started with the commands a user types, torn down by process id."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from areal_like.transport.ports import unused_port

RAY = str(Path(sys.executable).with_name("ray"))
START_S = 400.0
"""Deadline of `ray start`; generous, because it only bounds a hang."""
STORE_BYTES = 80 << 20
QUICK_TO_NOTICE = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
"""A dead node is noticed in seconds."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_task_events_report_interval_ms": "0",  # 0: none are kept
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",
}
"""What Ray's own processes do for dashboards and for tasks to come is left out: it took a quarter of these tests."""


class RayNode:
    """One node: `ray start --block` and all it started."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process, self.log_path = process, log_path

    def family(self) -> list[psutil.Process]:
        try:
            me = psutil.Process(self.process.pid)
            return [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill_raylet(self) -> None:
        """kill -9, as when the machine's power goes; Ray's other processes there follow."""
        (raylet,) = [one for one in self.family() if one.name() == "raylet"]
        os.kill(raylet.pid, signal.SIGKILL)

    def end(self) -> None:
        """Its processes, by their ids: a lingering one would hold its port."""
        family = self.family()
        for one in reversed(family):
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=300)
        self.process.wait(300.0)


class RayNodes:
    """The cluster. `environment`: for every command that is to find it and be let in."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """`addresses`: name=address of network namespaces that exist already; none: this machine's own."""
        self.folder = Path(tempfile.mkdtemp(prefix="arl", dir="/tmp"))  # short: Ray's sockets lie below it
        self._namespaces = dict(pair.split("=") for pair in addresses)
        self.nodes: list[RayNode] = []
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            **QUICK_TO_NOTICE,
            **QUIET,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_worker_niceness": "0",  # Ray's default is 15: other tests would take nearly all processor time
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("RAY_ADDRESS", None)

    def within(self, namespace: str) -> list[str]:
        """What a command is preceded by there."""
        return ["ip", "netns", "exec", namespace] if namespace else []

    def head(
        self, *, num_cpus: int, resources: Mapping[str, float], namespace: str = "", takes_jobs: bool = True
    ) -> RayNode:
        """`takes_jobs`: has the dashboard, which `ray job` asks."""
        port, dashboard_port = unused_port(), unused_port()
        host = self._namespaces.get(namespace, "")
        node = self._start(
            [
                "--head", f"--port={port}", f"--ray-client-server-port={unused_port()}", "--no-monitor",
                f"--temp-dir={self.folder / 'ray'}", f"--include-dashboard={takes_jobs}",
                f"--dashboard-port={dashboard_port}", f"--dashboard-host={host or '127.0.0.1'}",
            ],
            num_cpus, resources, namespace,
        )  # fmt: skip
        if not host:
            found: set[str] = set()
            deadline_s = time.monotonic() + START_S
            while not found:  # printed after the line that `_start` waits for
                assert time.monotonic() < deadline_s, node.log_path.read_text(errors="replace")
                found = set(re.findall(rf"--address='([^']+):{port}'", node.log_path.read_text(errors="replace")))
            (host,) = found
        self.environment["RAY_ADDRESS"] = f"{host}:{port}"
        self.dashboard = f"http://{host if namespace else '127.0.0.1'}:{dashboard_port}"
        return node

    def add(self, *, num_cpus: int, resources: Mapping[str, float], namespace: str = "") -> RayNode:
        return self._start([f"--address={self.environment['RAY_ADDRESS']}"], num_cpus, resources, namespace)

    def _start(self, words: list[str], num_cpus: int, resources: Mapping[str, float], namespace: str) -> RayNode:
        log_path = self.folder / f"node-{len(self.nodes)}.log"
        host = self._namespaces.get(namespace)
        environment = {key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *self.within(namespace), RAY, "start", "--block", *words, f"--num-cpus={num_cpus}", "--num-gpus=0",
                    "--min-worker-port=0", "--max-worker-port=0",
                    "--include-log-monitor=false",
                    f"--resources={json.dumps(resources)}", f"--object-store-memory={STORE_BYTES}",
                    f"--dashboard-agent-listen-port={unused_port()}", f"--metrics-export-port={unused_port()}",
                    *([f"--node-ip-address={host}"] if host else []),
                ],
                env=environment, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        node = RayNode(process, log_path)
        self.nodes.append(node)
        deadline_s = time.monotonic() + START_S
        while "Ray runtime started" not in log_path.read_text(errors="replace"):
            assert process.poll() is None, log_path.read_text(errors="replace")
            assert time.monotonic() < deadline_s, log_path.read_text(errors="replace")
            time.sleep(0.1)
        return node

    def ask(self, code: str, namespace: str = "") -> str:
        """What `code` prints in a process that is connected to the cluster as `ray`."""
        script = f"import ray\nray.init(log_to_driver=False, configure_logging=False)\n{code}"
        command = [*self.within(namespace), sys.executable, "-c", script]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def placement_groups(self, namespace: str = "") -> list[str]:
        """Names of the groups that hold places, or wait for them."""
        code = (
            "from ray.util.placement_group import placement_group_table\n"
            "print(*[row['name'] for row in placement_group_table().values() if row['state'] != 'REMOVED'], sep='\\n')"
        )
        return self.ask(code, namespace).split()

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.end()
        shutil.rmtree(self.folder, ignore_errors=True)
