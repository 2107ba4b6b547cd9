"""What a stranger can do to a hub's port: bounded attacks for the tests. Loopback only."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import zmq

from areal_like.transport import curve
from areal_like.transport.sockets import prefix
from areal_like.wire.encoding import encode
from areal_like.wire.messages import SHARED_RUN, Heartbeat, Hello, ScoreRequest

GROWTH_BYTES = 96 << 20
"""How much memory a service may take more under these attacks: 128 connections with half a MiB each, and some."""
NUM_CONNECTIONS = 128
WAIT_S = 300.0


def _greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def _ready() -> bytes:
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes([len(body)]) + body


@contextlib.contextmanager
def connections(address: str, count: int = NUM_CONNECTIONS) -> Iterator[list[socket.socket]]:
    """Raw TCP connections to a hub; reset at the end, as by a killed process."""
    parts = urlsplit(address)
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5.0))
            made[-1].settimeout(0.5)
        yield made
    finally:
        for one in made:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()


def _push(stream: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it hangs up on us: that is what it should do
        stream.sendall(data)


def garbage(address: str) -> None:
    """Random bytes, with and without a greeting before them."""
    dice = random.Random(0)
    with connections(address) as made:
        for number, stream in enumerate(made):
            _push(stream, (_greeting(b"CURVE") if number % 2 else b"") + dice.randbytes(20_000))


def flood_without_keys(address: str) -> None:
    """A handshake without keys, then thousands of messages, then a reset: what killed hubs with ZMQ_HEARTBEAT_IVL."""
    with connections(address) as made:
        for stream in made:
            _push(stream, _greeting(b"NULL") + _ready())
        for stream in made:
            _push(stream, b"\0\1x" * 4000)


def half_open(address: str) -> None:
    """Handshakes that never end: silent ones, and ones that announce gigabytes and send a megabyte of them."""
    with connections(address) as made:
        for number, stream in enumerate(made):
            _push(stream, _greeting(b"CURVE")[: 64 if number % 2 else 10])
        for number, stream in enumerate(made):
            if number % 2:
                size = 8 << 30 if number % 4 == 1 else 500_000
                _push(stream, b"\x06" + struct.pack(">Q", size) + bytes(min(size - 1, 1 << 20)))
        time.sleep(0.2)


def wrong_keys(address: str) -> None:
    """Clients of our own library with keys of their own."""
    with _dealers(address, curve.CurveKeys(**_made_up())) as dealers:
        for dealer in dealers:
            with contextlib.suppress(zmq.Again):
                for _ in range(100):
                    dealer.send_multipart([prefix("", 0), b"x" * 1000], zmq.NOBLOCK)
        time.sleep(0.3)
        assert not any(dealer.poll(0) for dealer in dealers), "a stranger got an answer"


def key_without_token(
    address: str, keys: Path, run_id: str = SHARED_RUN, refused: Callable[[], bool] = lambda: True
) -> None:
    """Holders of the client key, who were given no token, flood and claim names.

    The connections stay open until all have shaken hands and `refused` returns true (at most WAIT_S): how soon that is
    depends on the machine.
    """
    hello = Hello(role="rollout", name="rollout-0", pid=1, run_id=run_id, incarnation=secrets.token_hex(4))
    wish = ScoreRequest(
        request_id="1", scorer="", row={"prompt": "x" * 50_000}, response="x" * 50_000, finish_reason="stop",
        num_tokens=1, deadline_s=5.0,
    )  # fmt: skip
    with _dealers(address, curve.load_client(keys), count=16) as dealers:
        monitors = [dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) for dealer in dealers]
        for message in (wish, hello, Heartbeat(state="x"), wish):
            frames = [prefix("0" * 32, 1 << 40), *encode(message)]
            for dealer in dealers:
                with contextlib.suppress(zmq.Again):
                    for _ in range(200):
                        dealer.send_multipart(frames, zmq.NOBLOCK)
                    dealer.send_multipart([b"junk", b"\xc1", *[b"y" * 1000] * 50], zmq.NOBLOCK)
        end = time.monotonic() + WAIT_S
        assert all(monitor.poll(max(0.0, end - time.monotonic()) * 1000) for monitor in monitors), "no handshake"
        time.sleep(0.5)  # more of the flood leaves
        while not refused() and time.monotonic() < end:
            time.sleep(0.05)
        for dealer in dealers:
            dealer.disable_monitor()


def _made_up() -> dict[str, bytes]:
    public, secret = zmq.curve_keypair()
    return {"public": public, "secret": secret, "other_public": zmq.curve_keypair()[0]}


@contextlib.contextmanager
def _dealers(address: str, keys: curve.CurveKeys, count: int = 32) -> Iterator[list[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        made = [context.socket(zmq.DEALER) for _ in range(count)]
        for dealer in made:
            dealer.setsockopt(zmq.LINGER, 0)
            curve.enable_client(dealer, keys)
            dealer.connect(address)
        try:
            yield made
        finally:
            for dealer in made:
                dealer.close(0)


STRANGERS: tuple[Callable[[str], None], ...] = (garbage, flood_without_keys, half_open, wrong_keys)
"""Attacks that need nothing but the address."""


class PeakMemory:
    """The most memory that a process took, in bytes, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.start = self.peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """Above what it took in the beginning."""
        return self.peak - self.start

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.peak = max(self.peak, self._process.memory_info().rss)
