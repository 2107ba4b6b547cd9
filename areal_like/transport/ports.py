"""Which port of this machine a server can be given.

Owns: the choice, and the look whether one is free. Refuses: keeping it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from areal_like.errors import OperationError

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def can_listen(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could be given this port of this machine now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a dead server left behind is no server
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def quiet_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address `host` that nobody listens on.

    It lies outside the range the kernel takes for outgoing connections: a server that binds it later, or again after a
    restart, then finds it free although connections come and go.
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
    raise OperationError("no free port on this machine")
