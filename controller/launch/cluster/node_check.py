"""Checks every node before a run starts on it: one sentence for each missing item, with the node's address.

The facts are collected on the nodes by node_look.py; Ray's own state is in connection.py.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from areal_like.errors import first_line
from controller.config.engines import engine_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.launch.cluster.connection import Cluster
from controller.launch.cluster.seating import Node

PACKAGES = ("ray", "torch", "transformers", "pyzmq", "msgspec", "numpy")
"""Packages whose version must be the same on all nodes of a run."""
LOOK_S = 50.0
"""Deadline for all nodes together; nodes that do not answer are reported."""


@dataclass(frozen=True)
class Expected:
    """Expected facts of every node: those of the controller's machine."""

    python: str
    packages: Mapping[str, str]
    model: str | None
    run_dir: str
    engine: str
    engine_python: str | None
    controller: str
    max_clock_skew_s: float


def check_nodes(config: RunConfig, cluster: Cluster, nodes: Sequence[Node], run_dir: Path) -> list[Problem]:
    """Check all nodes in parallel. run_dir: a folder that all of them must be able to read and write."""
    engine, host = engine_of(config), config.launch.ray.host or cluster.own_address
    expected = Expected(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        model=_local_model(config),
        run_dir=str(run_dir),
        engine=engine.title,
        engine_python=engine.interpreter(config.rollout.engine),
        controller=host,
        max_clock_skew_s=config.launch.ray.max_clock_skew_s,
    )
    problems: list[Problem] = []
    with _token_in(run_dir) as token, _listener(host) as port:
        orders = {node.node_id: _order(expected, node, token, port) for node in nodes}
        asked_s = time.monotonic()
        seen = cluster.look_at(nodes, orders, LOOK_S)
        # repeated, because the first answer includes the start of a worker
        if any(isinstance(answer, dict) for answer in seen.values()):
            asked_s = time.monotonic()
            seen = cluster.look_at(nodes, orders, LOOK_S)
        took_s = time.monotonic() - asked_s
    for node in nodes:
        answer = seen[node.node_id]
        if isinstance(answer, Exception):
            what = f"node {node.address} cannot be inspected ({first_line(answer)})"
            problems.append(Problem(("launch.ray",), what, "check `ray status` and the logs in /tmp/ray on that node"))
            continue
        problems += node_problems(node.address, answer, expected, took_s=took_s)
    return problems


def node_problems(address: str, seen: Mapping[str, Any], expected: Expected, *, took_s: float) -> Iterator[Problem]:
    """Problems of one node, as a pure function of its facts. took_s: time from request to answer."""
    node = f"node {address}"
    if seen["python"].split(".")[:2] != expected.python.split(".")[:2]:
        what = f"{node} runs Python {seen['python']} ({seen['executable']}), but the controller runs {expected.python}"
        yield Problem(("launch.ray",), what, "start Ray on this node from the same environment as the controller")
    if not seen["is_installed"]:
        what = f"{node} has no installation of areal_like for {seen['executable']}"
        yield Problem(
            ("launch.ray",),
            what,
            "install areal_like on this node, or run `ray job submit --working-dir . -- ...` in a checkout",
        )
    for name, wanted in expected.packages.items():
        found = seen["packages"].get(name, "")
        if found.partition("+")[0] != wanted.partition("+")[0]:
            has, wants = (f"{name} {version}" if version else f"no {name}" for version in (found, wanted))
            what = f"{node} has {has}, but the controller has {wants}"
            yield Problem(("launch.ray",), what, f"pip install {name}=={wanted}" if wanted else f"pip uninstall {name}")
    if seen["model"]:
        what = f"{node} cannot read {expected.model} ({seen['model']})"
        yield Problem(
            ("model.path",),
            what,
            "use a folder that all nodes can access, or put a copy of the model at the same path on each node",
        )
    if seen["run_dir"]:
        what = f"{node} cannot use {expected.run_dir} ({seen['run_dir']})"
        yield Problem(("runs_dir",), what, "use a folder that is shared by all nodes and writable on each of them")
    if seen["engine_python"]:
        what = f"{node} has no {expected.engine} interpreter {expected.engine_python} ({seen['engine_python']})"
        yield Problem(
            ("rollout.engine.python",), what, "build the engine's environment at the same absolute path on every node"
        )
    if seen["controller"]:
        what = f"{node} cannot reach the controller at {expected.controller} ({seen['controller']})"
        yield Problem(
            ("launch.ray.host",), what, "set launch.ray.host to an address of this machine that the node can reach"
        )
    if seen["port"]:
        yield Problem(
            ("launch.ray",),
            f"{node} has no free port ({seen['port']})",
            "check the firewall and the resource limits of the node",
        )
    skew_s = abs(seen["time_s"] - time.time()) - took_s
    if skew_s > expected.max_clock_skew_s:
        what = f"{node}'s clock is off by at least {skew_s:.0f} s"
        yield Problem(
            ("launch.ray.max_clock_skew_s",), what, "synchronise the node's clock with NTP (chronyd, systemd-timesyncd)"
        )


def _order(expected: Expected, node: Node, token: tuple[str, str], port: int) -> dict[str, Any]:
    return {
        "packages": list(expected.packages),
        "model": expected.model,
        "run_dir": expected.run_dir,
        "token": token,
        "python": expected.engine_python,
        "controller": (expected.controller, port),
        "address": node.address,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _local_model(config: RunConfig) -> str | None:
    """model.path if it is a folder on this machine, which the other nodes must then have too; not for a hub name."""
    path = Path(config.model.path).expanduser() if config.model.path else None
    return str(path.resolve()) if path is not None and path.is_dir() else None


@contextlib.contextmanager
def _token_in(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Write a file with a token: a node that can read it sees the same folder, not another one of the same name."""
    content = secrets.token_hex(8)
    file = run_dir / f".areal_like-look-{content}"
    file.write_text(content)
    try:
        yield file.name, content
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _listener(host: str) -> Iterator[int]:
    """Accept connections at the controller's address; yields the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=256) as server:
        threading.Thread(target=_accept_all, args=(server,), name="cluster-look", daemon=True).start()
        yield int(server.getsockname()[1])


def _accept_all(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed: the check is over
        while True:
            server.accept()[0].close()
