"""Collects facts about a node of the cluster, on the node itself, before a process of the run is started there.

The facts are checked in node_check.py. The code is sent to the node by value, because areal_like may not be installed
there: only the standard library is used, and arguments and results are plain types.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOWEST_PORT = 20_000
"""Ray gives its own workers ports from 10002 to 19999."""
CONNECT_S = 5.0
"""Time limit of a connection to the controller."""


def look(order: dict[str, Any]) -> dict[str, Any]:
    """Facts about this node.

    order: packages (names), model (folder or None), run_dir, token (a file in run_dir and its content), python (an
    interpreter or None), controller (host, port) that accepts connections, address (of this node, to bind).
    """
    return {
        "time_s": time.time(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: _version(name) for name in order["packages"]},
        "is_installed": find_spec("areal_like") is not None and find_spec("controller") is not None,
        "model": _model(order["model"]),
        "run_dir": _run_dir(Path(order["run_dir"]), *order["token"]),
        "engine_python": _interpreter(order["python"]),
        "controller": _reach(*order["controller"]),
        "port": _bind(order["address"]),
    }


def free_port(address: str) -> int:
    """A free port of this node, outside the kernel's range for outgoing connections."""
    try:
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32768
    start = int.from_bytes(os.urandom(4), "big")
    span = max(1, lowest - LOWEST_PORT)
    for attempt in range(64):
        port = LOWEST_PORT + (start + attempt * 7919) % span
        with socket.socket(_family(address)) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise OSError(f"there is no free port on {address}")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _model(folder: str | None) -> str:
    """Why the model cannot be read; empty if it can, or if none is given."""
    if folder is None:
        return ""
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def _run_dir(folder: Path, token_file: str, token: str) -> str:
    """Why the run folder cannot be used; empty if it can."""
    try:
        if (folder / token_file).read_text() != token:
            return "the node has a different folder at this path"
        probe = folder / f".areal_like-{uuid.uuid4().hex}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _interpreter(python: str | None) -> str:
    if python is None or os.access(python, os.X_OK):
        return ""
    return "it does not exist" if not os.path.exists(python) else "it cannot be executed"


def _reach(host: str, port: int) -> str:
    """Why the controller cannot be reached; empty if it can."""
    try:
        with socket.create_connection((host, port), CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def _bind(address: str) -> str:
    """Why no server can listen here; empty if one can."""
    try:
        free_port(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""
