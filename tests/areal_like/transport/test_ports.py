"""Claims about the ports servers are given."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_like.transport import ports
from areal_like.transport.ports import unused_port


def test_quiet_port_lies_outside_the_range_of_outgoing_connections():
    chosen = {unused_port() for _ in range(20)}
    if sys.platform == "linux":
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert all(port < lowest for port in chosen) or lowest <= 10_000
    assert all(1024 <= port < 65536 for port in chosen)


def test_quiet_port_is_found_where_the_kernel_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(ports, "_PORT_RANGE", tmp_path / "absent")
    assert unused_port()
