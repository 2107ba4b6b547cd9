"""A hub and its peers over real sockets on loopback, and a peer that sends what it likes, for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from made_keys import run_keys

from areal_like.trajectory import Segment
from areal_like.transport import curve
from areal_like.transport.channel import Hub, Peer
from areal_like.transport.credentials import token_for
from areal_like.transport.sockets import prefix
from areal_like.wire.encoding import encode
from areal_like.wire.messages import PROTOCOL, Heartbeat, Hello, Message, SampleAck, SampleReturned

WAIT_S = 300.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await test

    asyncio.run(bounded())


def returned(length: int = 3, lease_id: int = 1) -> SampleReturned:
    tokens = np.arange(length, dtype=np.int32)
    segment = Segment(tokens, np.full(length, -1.0, np.float32), np.zeros(length, np.int32))
    return SampleReturned(lease_id=lease_id, start=0, segment=segment, reason="drain")


def hello(
    name: str = "rollout-0", incarnation: str = "a", run_id: str = "r", protocol: int = PROTOCOL, token: str = ""
) -> Hello:
    return Hello(
        role="rollout",
        name=name,
        pid=os.getpid(),
        run_id=run_id,
        incarnation=incarnation,
        protocol=protocol,
        capacity=4,
        token=token,
    )


@contextlib.asynccontextmanager
async def open_hub(bind: str = "tcp://127.0.0.1:0", curve_dir: Path | None = None) -> AsyncIterator[tuple[Hub, str]]:
    hub = Hub(
        run_id="r", role="controller", bind=bind, curve_dir=curve_dir or run_keys(), accept=frozenset({SampleReturned})
    )
    address = await hub.start()
    try:
        yield hub, address
    finally:
        await hub.close()


@contextlib.asynccontextmanager
async def open_peer(
    address: str,
    greeting: Hello | None = None,
    *,
    curve_dir: Path | None = None,
    status: Callable[[], Heartbeat] = lambda: Heartbeat(state="generate"),
) -> AsyncIterator[Peer]:
    peer = Peer(
        address=address, hello=greeting or hello(), curve_dir=curve_dir or run_keys(), audience="controller",
        accept=frozenset({SampleAck}), heartbeat_s=0.02, silence_s=1.0, status=status,
    )  # fmt: skip
    try:
        yield peer
    finally:
        await peer.close()


class RawPeer:
    """A DEALER that holds the run's client key and sends what it likes, token and registration included."""

    def __init__(self, address: str, receive_queue: int = 1000, send_queue: int = 1000) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.setsockopt(zmq.SNDHWM, send_queue)
        self.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
        self.socket.setsockopt(zmq.LINGER, 0)
        curve.enable_client(self.socket, curve.load_client(run_keys()))
        self.socket.connect(address)

    def send(self, message: Message, registration: str = "", position: int = 0) -> None:
        self.send_frames(encode(message), registration, position)

    def send_frames(self, frames: Sequence[Any], registration: str = "", position: int = 0) -> None:
        self.socket.send_multipart([prefix(registration, position), *frames])

    def say_hello(self, name: str = "rollout-0", incarnation: str = "a") -> None:
        self.send(hello(name, incarnation, token=token_for(run_keys(), "controller", "rollout", name)))

    def close(self) -> None:
        self.socket.close(0)


@contextlib.contextmanager
def raw_peer(address: str, receive_queue: int = 1000) -> Iterator[RawPeer]:
    peer = RawPeer(address, receive_queue)
    try:
        yield peer
    finally:
        peer.close()


async def met(hub: Hub, peer: Peer) -> Hello:
    """Connect; returns the Hello the hub passed up."""
    connecting = asyncio.create_task(peer.connect(WAIT_S))
    received = await expect(hub, Hello)
    await connecting
    assert isinstance(received, Hello)
    return received


async def expect(hub: Hub, kind: type[Message]) -> Message:
    received = await hub.receive(WAIT_S)
    assert received is not None
    assert isinstance(received[1], kind), received
    return received[1]


async def serve_until(hub: Hub, is_done: Callable[[], bool]) -> list[tuple[str, Message]]:
    passed_up = []
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline_s, (hub.counters, passed_up)
        received = await hub.receive(0.02)
        if received is not None:
            passed_up.append(received)
    return passed_up
