"""A ZeroMQ socket driven by one asyncio loop, without a task or a future per message.

The ZeroMQ descriptor is edge-triggered: it announces changes of state, and any operation on the socket, including a
send, may clear an announcement. So EVENTS is read after each operation and before each wait.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import zmq

from areal_like.errors import UserError
from areal_like.wire.encoding import LARGE_BYTES, MAX_FRAME_BYTES, Frame

LINGER_S = 1.0
"""Time for which a closing socket continues to send queued messages (a Goodbye, a last acknowledgement)."""
QUEUE_MESSAGES = 1000
"""High-water mark of messages to send to one peer, and bound of a Peer's inbox. Credits limit normal traffic to a few
hundred messages; a thousand waiting ones mean that the reader has stopped, and a larger queue would only hide it."""
RECEIVE_QUEUE_MESSAGES = 16
"""High-water mark of unread messages from one peer; further messages wait at the sender."""
MAX_TRANSPORT_FRAME_BYTES = 2 * MAX_FRAME_BYTES
"""Largest frame that is accepted: the largest one that is sent, plus the overhead of encryption."""
WINDOW_BYTES = 1 << 20
"""Number of bytes that a peer may send ahead of what the hub has reported as read; below a quarter of it, one larger
message may be sent. It bounds what a hub that does not read holds for each registered peer."""
READ_BYTES = "read_bytes"
"""Counter in the hub's answer to a heartbeat: number of bytes that the peer had sent with the newest message that the
hub has read."""
REGISTRATION_BYTES = 32
HANDSHAKE_S = 10.0
"""Time after which a connection that has not proved its key is closed."""
BURST = 64
"""Number of ready messages that are processed before control returns to the loop."""
LISTEN_S = 0.2
"""Longest uninterrupted wait: it keeps the listening clock running, and recovers from a lost wake-up."""

_OPEN_CONTEXTS: set[zmq.Context[zmq.Socket[bytes]]] = set()


class Signal:
    """Wakes all current waiters; a wait is one future and one timer, and always has a deadline."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[bool]] = set()

    def set(self) -> None:
        """Wake all current waiters."""
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


class ListeningClock:
    """Counts the seconds during which this process listened. A gap counts for at most MAX_GAP_S.

    Silence is measured with this clock: a process that did not listen for a minute (a blocked loop, a suspended laptop)
    must not conclude that all others were silent for a minute.
    """

    MAX_GAP_S = 1.0

    def __init__(self) -> None:
        self._stamp_s = time.monotonic()
        self._listened_s = 0.0

    def tick(self) -> float:
        """Record that this process is listening now, and return the reading."""
        now_s = time.monotonic()
        self._listened_s += min(now_s - self._stamp_s, self.MAX_GAP_S)
        self._stamp_s = now_s
        return self._listened_s


class RateLimitedLog:
    """Logs at most one line per kind and INTERVAL_S, with the number of lines suppressed since the last."""

    INTERVAL_S = 10.0

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def log(self, kind: str, text: str) -> None:
        """Log `text` unless another one of `kind` was logged a moment ago."""
        now_s = time.monotonic()
        if now_s < self._next_s.get(kind, 0.0):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return
        suppressed = self._suppressed.pop(kind, 0)
        self._next_s[kind] = now_s + self.INTERVAL_S
        self._log.warning(
            "%s: %s%s", kind, text, f" ({suppressed} similar messages were suppressed)" if suppressed else ""
        )


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Create a context that exists until `terminate`, even if its owner never calls it.

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
        """Start watching the descriptor. Call it within the loop, after bind or connect."""
        self._fd = int(self.raw.getsockopt(zmq.FD))  # set first: `close` assumes a descriptor if there is a loop
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
        """Queue one message. Raises zmq.Again when the queue is full, zmq.ZMQError if there is no route."""
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
    """Raise UserError for anything other than tcp://host:port."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.netloc or ":" not in parts.netloc:
        raise UserError(f"invalid address: {address!r}", remedy="write tcp://host:port")


def is_reachable(host: str) -> bool:
    """Whether other machines may reach a server at this address of ours: neither loopback nor all interfaces."""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host != "localhost"
    return not found.is_loopback and not found.is_unspecified


def own_host(hub_address: str) -> str:
    """The address of this host on the route to the controller, which other hosts of the run can reach.

    It uses the routing table, through a datagram socket; nothing is sent.
    """
    parts = urlsplit(hub_address)
    host, port = parts.hostname or "127.0.0.1", parts.port or 1
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise UserError(
                f"there is no network route to the controller: {error.strerror}", where=hub_address
            ) from error
        name = str(probe.getsockname()[0])
    return f"[{name}]" if family == socket.AF_INET6 else name


def prefix(registration: str, position: int) -> bytes:
    """First frame of each message of a peer: the secret of its registration, and the number of bytes that it has sent,
    including this message.

    Lost bytes count as sent, so a hub that reads a later message knows that they are not waiting.
    """
    return registration.encode().ljust(REGISTRATION_BYTES, b"\0") + position.to_bytes(8, "little")


def read_prefix(frame: Frame) -> tuple[bytes, int]:
    """Registration and position; empty and 0 for a frame that `prefix` did not create."""
    if len(frame) != REGISTRATION_BYTES + 8:
        return b"", 0
    data = bytes(frame)
    return data[:REGISTRATION_BYTES].rstrip(b"\0"), int.from_bytes(data[REGISTRATION_BYTES:], "little")


def set_options(raw: zmq.Socket[bytes]) -> None:
    """Set bounds on the memory of a connection, and probes that find a dead one. Call it before bind or connect."""
    raw.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    raw.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
    # Bounds one frame. The transport closes a connection that announces a larger one before it allocates memory, even #
    # before the handshake.
    raw.setsockopt(zmq.MAXMSGSIZE, MAX_TRANSPORT_FRAME_BYTES)
    raw.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    # The kernel probes idle connections: one whose other machine is lost ends after about a minute. Heartbeats find # a
    # stopped process earlier (channel.py). Never ZMQ_HEARTBEAT_IVL: in libzmq 4.3.5 a connection that breaks while its
    # queue is full aborts the process at the next probe (assertion `!_io_error`).
    raw.setsockopt(zmq.TCP_KEEPALIVE, 1)
    raw.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    raw.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    raw.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
