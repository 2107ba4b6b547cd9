"""Finds a free port of this machine for a server. The port is not reserved."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from areal_like.errors import OperationError

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def can_listen(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port of this machine now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections left by a dead server do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def unused_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address `host` that no process listens on.

    It is outside the range that the kernel uses for outgoing connections, so it stays free for a server that binds it
    later, or again after a restart.
    """
    try:
        lowest = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32768
    candidates = random.sample(range(10_000, lowest), min(64, lowest - 10_000)) if lowest > 10_000 else []
    for port in [*candidates, 0]:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OperationError("this machine has no free port")
