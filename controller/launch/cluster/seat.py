"""The seat of one process on a node of the cluster: a small Ray actor that starts the process as its child.

Manages the child, forwards its log to the controller, and stores the run's keys on this node (owner-only files).
Restarts are decided by the controller's supervisor. ray and torch are not imported.

The child is killed with its seat by the kernel (areal_like.process.die_with_parent), and so also with Ray's worker
process and its node. The parent-death signal is bound to the thread that started the child, so that thread waits for
its exit. Files left by a killed seat are removed by the next one on its node.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from areal_like.process import PRIVATE_UMASK
from areal_like.store_owner import claim, sweep_dead
from areal_like.transport.ports import unused_port
from areal_like.weights.weight_store import default_root
from controller.launch.processor import cpu_seconds, rss_mb

CHUNK_BYTES = 256 << 10
"""Maximum bytes of a log in one answer."""
POLL_S = 0.1
"""Interval of checks for new log lines."""
LOOK_S = 1.0
"""Interval of measurements of the child and its children."""
START_S = 300.0
"""Time limit of fork and exec, only to detect a hang: on a busy node it takes many seconds."""
SPEC_PLACE = "{spec}"
"""Placeholder for the spec's file in an argv: each node writes its own."""


@dataclass(frozen=True)
class Order:
    """What a seat starts. Sent as an argument of the actor's method, because Ray does not display these."""

    argv: tuple[str, ...]
    spec: str
    """The process's spec, as JSON; addresses and folders of this node are filled in here."""
    num_threads: int
    user_path: str
    keys: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict, repr=False)
    """Key files by the field of the spec that names their folder."""
    weight_versions: int = 0
    """For a trainer that streams weights: bytes of the versions kept on this node; 0: the spec's folder is used."""


class Seated(NamedTuple):
    """Location of the child."""

    pid: int
    node_id: str
    address: str


class Place(NamedTuple):
    """Location of a seat, before a process is started. port: a free port of this address."""

    node_id: str
    address: str
    port: int


class News(NamedTuple):
    """New bytes of the log, and the exit once the log was reported completely."""

    log: bytes
    returncode: int | None
    cpu_s: float | None
    """Processor time of the child and its descendants."""
    rss_mb: float | None


class Seat:
    """The actor of one child. Methods are called by the controller, several concurrently."""

    def __init__(self, node_id: str = "", address: str = "") -> None:
        temporary = Path(tempfile.gettempdir())
        sweep_dead(temporary)
        sweep_dead()
        self._folder = Path(tempfile.mkdtemp(prefix="areal_like-seat-", dir=temporary))  # mode 0700
        claim(self._folder)
        self._node_id, self._address = node_id, address
        self._log = self._folder / "process.log"
        self._log.touch()
        self._child: subprocess.Popen[bytes] | None = None
        self._weights: Path | None = None
        self._spawned, self._ended = threading.Event(), threading.Event()
        self._fault: OSError | None = None
        self._looked_s: float | None = None
        self._found: tuple[float | None, float | None] = (None, None)

    def place(self) -> Place:
        """Return its location. It answers as soon as Ray has placed it on a node."""
        if not self._node_id:
            self._node_id, self._address = _whereabouts()
        return Place(self._node_id, self._address, unused_port(self._address))

    def start(self, order: Order) -> Seated:
        """Start the child; after `place`. Raises OSError if the node cannot start it."""
        argv = self._argv(order)
        thread = threading.Thread(target=self._live, args=(argv, order), name="child", daemon=True)
        thread.start()
        if not self._spawned.wait(START_S):
            raise OSError(f"the process did not start within {START_S:g} s")
        if self._fault is not None:
            raise self._fault
        assert self._child is not None
        return Seated(self._child.pid, self._node_id, self._address)

    def news(self, offset: int, wait_s: float) -> News:
        """Wait for log output after `offset`, or the child's exit, at most `wait_s`, and return it."""
        deadline_s = time.monotonic() + wait_s
        while True:
            has_ended = self._ended.is_set()
            with self._log.open("rb") as file:
                file.seek(offset)
                data = file.read(CHUNK_BYTES)
            if data or has_ended or time.monotonic() >= deadline_s:
                returncode = self._child.returncode if has_ended and not data and self._child else None
                return News(data, returncode, *self._used())
            self._ended.wait(POLL_S)

    def signal(self, number: int, *, whole_session: bool) -> None:
        """Send a signal to the child, or also to its descendants."""
        child = self._child
        if child is None or (self._ended.is_set() and not whole_session):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if whole_session else os.kill)(child.pid, number)

    def close(self) -> None:
        """Kill remaining processes and remove files on this node."""
        self.signal(signal.SIGKILL, whole_session=True)
        self._ended.wait(START_S if self._child is not None else 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._weights is not None:
            shutil.rmtree(self._weights, ignore_errors=True)

    # ------------------------------------------------------------ inside

    def _argv(self, order: Order) -> list[str]:
        """The child's command line, with its spec written for this node."""
        spec = json.loads(order.spec)
        spec["parent_pid"] = os.getpid()
        if spec.get("bind_address"):  # the address it listens on is on this node
            spec["bind_address"] = with_host(spec["bind_address"], self._address)
        for key, files in order.keys.items():
            spec[key] = str(_write_private(self._folder / key, files))
        if order.weight_versions:
            spec["weight_dir"] = str(self._weight_dir(spec, order.weight_versions))
        file = self._folder / "spec.json"
        file.write_text(json.dumps(spec, indent=1))
        return [sys.executable, "-P", *(str(file) if word == SPEC_PLACE else word for word in order.argv)]

    def _weight_dir(self, spec: Mapping[str, Any], num_versions: int) -> Path:
        """This node's store of versions: in shared memory if they fit, else in the run folder."""
        from controller.config.model_folder import weight_bytes

        model = spec["model"].get("path")
        need_bytes = max(64 << 20, weight_bytes(Path(model)) * num_versions) if model else 64 << 20
        self._weights = default_root(spec["run_id"], "shm", Path(spec["run_dir"]), need_bytes)
        return self._weights

    def _live(self, argv: list[str], order: Order) -> None:
        """Start the child and wait for its exit."""
        from controller.launch.environments import child_environment

        # A submitted job's working directory has the same path on every node, and may be unpacked again at any time.
        user_path = Path(order.user_path)
        environment = child_environment(order.num_threads, user_path=user_path)
        environment |= _interfaces(self._address, environment)
        try:
            with self._log.open("ab") as log:
                self._child = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
                    umask=PRIVATE_UMASK,
                    cwd=user_path if user_path.is_dir() else self._folder, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._fault = error
            self._ended.set()
            return
        finally:
            self._spawned.set()
        self._child.wait()
        self.signal(signal.SIGKILL, whole_session=True)  # its descendants are killed with it
        self._ended.set()

    def _used(self) -> tuple[float | None, float | None]:
        """Processor time in seconds, resident memory in MiB."""
        if self._child is None:
            return None, None
        pid, now_s = self._child.pid, time.monotonic()
        # limited, because this is called for every line of a verbose process
        if self._looked_s is None or now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._found = now_s, (cpu_seconds([pid]).get(pid), rss_mb(pid))
        return self._found


def with_host(address: str, host: str) -> str:
    """tcp://host:port with another host."""
    shown = f"[{host}]" if ":" in host else host
    return f"tcp://{shown}:{address.rpartition(':')[2]}"


def _whereabouts() -> tuple[str, str]:
    """Node id and address, as Ray knows them."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


def _write_private(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    return folder


def _interfaces(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Trainer ranks meet at this node's address in the cluster, not at what its host name resolves to."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return {}
    except ValueError:
        return {}
    names = [name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found)]
    wanted = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}
    return {key: value for key, value in wanted.items() if key not in environment}
