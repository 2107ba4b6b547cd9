"""A ZeroMQ socket driven by one asyncio loop, without a task or a future per message.

Owns: readiness (the edge-triggered ZeroMQ descriptor), waiting with a deadline, the patience clock, rate-limited
complaints, the options of every socket. Refuses: knowing what a message means.

The trap this file exists for: the descriptor announces changes of state, and any operation on the socket, a send too,
may swallow an announcement. So each operation is followed by a look at EVENTS, and each wait is preceded by one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import zmq

from areal_like.errors import UserError
from areal_like.wire.encoding import LARGE_BYTES, MAX_FRAME_BYTES, Frame

LINGER_S = 1.0
"""How long a closing socket goes on sending what was queued (a Goodbye, a last acknowledgement)."""
QUEUE_MESSAGES = 1000
"""High-water mark of what waits to be sent to one peer, and bound of a Peer's inbox. Credits keep honest traffic to a
few hundred messages; a thousand waiting ones mean that the reader has stopped, and more would only hide it."""
RECEIVE_QUEUE_MESSAGES = 16
"""High-water mark of what was received from one peer and not read yet; more waits where it was sent."""
MAX_TRANSPORT_FRAME_BYTES = 2 * MAX_FRAME_BYTES
"""Above what we send, with room for what encryption adds."""
WINDOW_BYTES = 1 << 20
"""What a peer may have sent to a hub that the hub has not reported as read; if it is less than a quarter of that, one
larger message may go. A hub that does not read thus holds little of each registered peer."""
READ_BYTES = "read_bytes"
"""Counter in the hub's answer to a heartbeat: bytes the peer had sent with the newest message that the hub has read."""
REGISTRATION_BYTES = 32
HANDSHAKE_S = 10.0
"""A connection that has not proved its key by then is closed."""
BURST = 64
"""Ready messages handed out before the loop gets a turn."""
LISTEN_S = 0.2
"""Longest uninterrupted wait: keeps the patience clock going, and would fix a lost wake-up."""

_OPEN_CONTEXTS: set[zmq.Context[zmq.Socket[bytes]]] = set()


class Signal:
    """Wakes everybody who waits now; a wait is one future and one timer, and always has a deadline."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[bool]] = set()

    def set(self) -> None:
        """Wake all present waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, timeout_s: float) -> bool:
        """True when woken, False when `timeout_s` passed."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(max(timeout_s, 0.0), _expire, waiter)
        self._waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class PatienceClock:
    """Seconds during which we were listening. A gap in our own attention counts for MAX_GAP_S at most.

    Silence is judged by this clock: one that was not listening for a minute (a blocked loop, a suspended laptop) must
    not conclude that everybody else was silent for a minute.
    """

    MAX_GAP_S = 1.0

    def __init__(self) -> None:
        self._stamp_s = time.monotonic()
        self._listened_s = 0.0

    def tick(self) -> float:
        """Note that we are listening now; returns the reading."""
        now_s = time.monotonic()
        self._listened_s += min(now_s - self._stamp_s, self.MAX_GAP_S)
        self._stamp_s = now_s
        return self._listened_s


class RateLimitedLog:
    """At most one log line per kind and INTERVAL_S, saying how many were swallowed since the last."""

    INTERVAL_S = 10.0

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s: dict[str, float] = {}
        self._swallowed: dict[str, int] = {}

    def say(self, kind: str, text: str) -> None:
        """Log `text` unless another one of `kind` was logged a moment ago."""
        now_s = time.monotonic()
        if now_s < self._next_s.get(kind, 0.0):
            self._swallowed[kind] = self._swallowed.get(kind, 0) + 1
            return
        swallowed = self._swallowed.pop(kind, 0)
        self._next_s[kind] = now_s + self.INTERVAL_S
        self._log.warning("%s: %s%s", kind, text, f" (and {swallowed} more before)" if swallowed else "")


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a context that lives until `terminate`, even where its owner never calls it.

    If a context and its sockets became garbage together, pyzmq would terminate the context first and wait indefinitely
    for sockets that are closed only afterwards.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    _OPEN_CONTEXTS.add(context)
    return context


def terminate(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Terminate a context whose sockets were closed. Blocks for at most LINGER_S."""
    context.term()
    _OPEN_CONTEXTS.discard(context)


class ReadySocket:
    """One socket on one loop. `on_ready(events)` is called from the loop, never from inside `send` or `receive`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, on_ready: Callable[[int], None]) -> None:
        self.raw: zmq.Socket[bytes] = context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, int(LINGER_S * 1000))
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd: int
        """Known once it is attached."""
        self._recheck_pending = False

    def attach(self) -> None:
        """Begin to watch the descriptor. Call within the loop, after bind or connect."""
        self._fd = int(self.raw.getsockopt(zmq.FD))  # first: `close` takes a loop as the sign that there is one
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)
        self._recheck()

    def receive(self) -> list[Frame] | None:
        """The frames of one waiting message, or None. Small frames are copied (aligned), large ones are not."""
        try:
            parts = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [part.bytes if len(part) < LARGE_BYTES else memoryview(part.buffer) for part in parts]

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue one message. Raises zmq.Again when the queue is full, zmq.ZMQError when there is no way."""
        try:
            self.raw.send_multipart(frames, zmq.NOBLOCK, copy=False)
        finally:
            self._recheck()

    def close(self) -> None:
        """Stop watching and close; queued messages linger in the context."""
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._loop = None
        self.raw.close()

    def _recheck(self) -> None:
        if self._loop is not None and not self._recheck_pending:
            self._recheck_pending = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._recheck_pending = False
        if self._loop is None:
            return
        events = int(self.raw.getsockopt(zmq.EVENTS))
        if events:
            self._on_ready(events)


def check_address(address: str) -> None:
    """Raises UserError for anything but tcp://host:port."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.netloc or ":" not in parts.netloc:
        raise UserError(f"not an address: {address!r}", remedy="write tcp://host:port")


def own_host(hub_address: str) -> str:
    """The address of this host on the way to the controller: what other hosts of the run can reach.

    Asks the routing table by a datagram socket; nothing is sent.
    """
    parts = urlsplit(hub_address)
    host, port = parts.hostname or "127.0.0.1", parts.port or 1
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(f"no network route to the controller: {error.strerror}", where=hub_address) from error
        name = str(probe.getsockname()[0])
    return f"[{name}]" if family == socket.AF_INET6 else name


def prefix(registration: str, position: int) -> bytes:
    """First frame of what a peer sends: the secret of its registration, and how many bytes it has sent with this one.

    Bytes that were lost on the way count as sent, so a hub that reads a later message knows that they do not wait.
    """
    return registration.encode().ljust(REGISTRATION_BYTES, b"\0") + position.to_bytes(8, "little")


def read_prefix(frame: Frame) -> tuple[bytes, int]:
    """Registration and position; nothing and 0 for another frame than `prefix` makes."""
    if len(frame) != REGISTRATION_BYTES + 8:
        return b"", 0
    data = bytes(frame)
    return data[:REGISTRATION_BYTES].rstrip(b"\0"), int.from_bytes(data[REGISTRATION_BYTES:], "little")


def set_options(raw: zmq.Socket[bytes]) -> None:
    """Bounds on what a connection may hold, and probes that find a dead one. Before bind or connect."""
    raw.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    raw.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    # Of one frame. The transport closes a connection that announces more, before it takes memory for it; it also holds
    # before the handshake, when nobody knows yet who is there.
    raw.setsockopt(zmq.MAXMSGSIZE, MAX_TRANSPORT_FRAME_BYTES)
    raw.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    # The kernel probes idle connections: one whose other machine is gone ends after about a minute, and who has
    # stopped is found earlier by heartbeats (channel.py). Never ZMQ_HEARTBEAT_IVL: in libzmq 4.3.5 a connection that
    # breaks while its queue is full aborts the process at the next probe (assertion `!_io_error`).
    raw.setsockopt(zmq.TCP_KEEPALIVE, 1)
    raw.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    raw.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    raw.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
