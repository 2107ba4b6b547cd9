"""Checks of loopback, ports, and ZeroMQ, with one exchange in plain text and one with CURVE.

Only loopback is used.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import TYPE_CHECKING

from areal_like.errors import OperationError
from controller.doctor.finding import NOT_HERE, Check, Finding, count, ok, problem, warning
from controller.doctor.machine import Machine

if TYPE_CHECKING:
    import zmq

TOPIC = "Network"
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
LOWEST_SERVER_PORT = 10_000
"""A run's servers use ports from here up to the range of outgoing connections."""
WAIT_MS = 3000
EXCHANGES = 20


def port_range(machine: Machine) -> Finding:
    """Check the port range of outgoing connections; a run's servers bind below it."""
    words = machine.text(PORT_RANGE).split()
    if len(words) != 2:
        return NOT_HERE
    low, high = map(int, words)
    data = {"low": low, "high": high}
    text = f"{low} to {high} for outgoing connections"
    if low <= LOWEST_SERVER_PORT + 100:
        return warning(
            f"{text}; this leaves too few ports for the servers of a run, so a restarted server may find its "
            "port in use",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'", **data,
        )  # fmt: skip
    if high - low < 1000:
        return warning(
            f"{text}; this range has fewer than 1000 ports", "sysctl net.ipv4.ip_local_port_range='32768 60999'", **data
        )
    return ok(f"{text}, {count(low - LOWEST_SERVER_PORT, 'port')} below this range for servers", **data)


def loopback(machine: Machine) -> Finding:
    """Check that a free port on 127.0.0.1 can be bound and connected to."""
    # Bound once, to any port: a port that was probed and closed may stay in use for a moment, by a process that another
    # check is starting.
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=3),
        ):
            port = server.getsockname()[1]
            server.settimeout(3)
            server.accept()[0].close()
    except OSError as error:
        return problem(f"127.0.0.1: {error}", "enable the loopback interface: ip link set lo up")
    return ok(f"127.0.0.1:{port} is free and accepts connections", port=port)


def zeromq(machine: Machine) -> Finding:
    """Check an exchange of a few messages between a ROUTER and a DEALER."""
    import zmq

    versions = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}"
    data = {"libzmq": zmq.zmq_version(), "pyzmq": zmq.pyzmq_version()}
    try:
        wall_s = round_trip(is_encrypted=False)
    except (zmq.ZMQError, OperationError) as error:
        return problem(
            f"{versions}: {error}",
            "pip install --force-reinstall pyzmq; check whether a firewall blocks the loopback interface",
            **data,
        )
    return ok(f"{versions}, round trip {wall_s * 1e6:.0f} us", round_trip_s=wall_s, **data)


def curve(machine: Machine) -> Finding:
    """Check that libzmq supports CURVE encryption, and that an exchange works."""
    import zmq

    how = "only needed for connections between machines: pip install pyzmq, whose wheels include CURVE"
    if not zmq.has("curve"):
        return warning("this libzmq was built without CURVE", how)
    try:
        wall_s = round_trip(is_encrypted=True)
    except (zmq.ZMQError, OperationError) as error:
        return warning(f"CURVE is available but does not work: {error}", how)
    return ok(f"works, round trip {wall_s * 1e6:.0f} us", round_trip_s=wall_s)


def round_trip(*, is_encrypted: bool) -> float:
    """Median wall seconds of a small exchange. Raises zmq.ZMQError, or OperationError if no answer arrives."""
    import zmq

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for end in (router, dealer):
            end.setsockopt(zmq.LINGER, 0)
        if is_encrypted:
            public, secret = zmq.curve_keypair()
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, public)
            own_public, own_secret = zmq.curve_keypair()
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, own_secret)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        walls_s = []
        for _ in range(EXCHANGES):
            started_s = time.perf_counter()
            dealer.send(b"doctor")
            router.send_multipart(_received(router))
            _received(dealer)
            walls_s.append(time.perf_counter() - started_s)
        return statistics.median(walls_s)
    finally:
        context.destroy(linger=0)


def _received(end: zmq.Socket[bytes]) -> list[bytes]:
    if not end.poll(WAIT_MS):
        raise OperationError(f"a message over loopback did not arrive within {WAIT_MS / 1000:g} s")
    return list(end.recv_multipart())


CHECKS = (
    Check(TOPIC, "ports", port_range),
    Check(TOPIC, "loopback", loopback, is_needed=True),
    Check(TOPIC, "ZeroMQ", zeromq, is_needed=True),
    Check(TOPIC, "CURVE", curve),
)
