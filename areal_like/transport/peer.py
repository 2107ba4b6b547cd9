"""The peer end of a channel: one DEALER that registers with a hub, and again when the hub has no record of it.

channel.py describes how both ends work together. See channel.py for how both ends work together.

At most WINDOW_BYTES, or a quarter of that and one larger message, are sent ahead of what the hub has read; then `send`
waits. Heartbeats and Hellos are small and never wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from areal_like.errors import ChannelError, DeadlineExceeded, UserError, WireError
from areal_like.transport import curve
from areal_like.transport.credentials import Audience, token_for
from areal_like.transport.sockets import (
    BURST,
    LINGER_S,
    LISTEN_S,
    QUEUE_MESSAGES,
    READ_BYTES,
    WINDOW_BYTES,
    ListeningClock,
    RateLimitedLog,
    ReadySocket,
    Signal,
    check_address,
    open_context,
    prefix,
    set_options,
    terminate,
)
from areal_like.wire.encoding import Frame, WireLimits, cut, decode, encode, join
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, Message, Refused, Shutdown, Welcome

log = logging.getLogger(__name__)


class Peer:
    """The DEALER end. Used from one event loop; it reconnects and registers again automatically."""

    UNANSWERED_BEATS = 8
    """After this many heartbeats without an answer a Hello is queued only at every eighth interval, so that a hub that
    returns after an hour does not receive thousands of stale heartbeats."""

    def __init__(
        self,
        *,
        address: str,
        hello: Hello,
        curve_dir: Path,
        audience: Audience,
        accept: frozenset[type],
        heartbeat_s: float,
        silence_s: float,
        status: Callable[[], Heartbeat],
        limits: WireLimits | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.silence_s = silence_s
        self._address, self._hello, self._curve_dir, self._audience = address, hello, curve_dir, audience
        self._accept = accept | {Welcome, Refused, Heartbeat, Shutdown}
        self._heartbeat_s, self._status = heartbeat_s, status
        self._limits = limits or WireLimits()
        self._inbox: deque[Message] = deque()
        self._arrived, self._writable = Signal(), Signal()
        self._patience = ListeningClock()
        self._received_s = 0.0
        self._unanswered = 0
        self._num_since_pause = 0
        self._sent_bytes = self._read_bytes = 0
        self._welcome: Welcome | None = None
        self._failure: Exception | None = None
        self._warnings = RateLimitedLog(log)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: ReadySocket | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def hub_silence_s(self) -> float:
        """Seconds without a message from the hub, counted while this process listened; compare with `silence_s`."""
        self._drain()
        if len(self._inbox) >= QUEUE_MESSAGES:
            return 0.0  # this side stopped reading
        return self._patience.tick() - self._received_s

    async def connect(self, timeout_s: float) -> Welcome:
        """Register with the hub, repeating the Hello until it answers.

        Args:
            timeout_s: longest wait.

        Returns:
            The hub's answer.

        Raises:
            ChannelError: the hub refused.
            DeadlineExceeded: it did not answer in time.
            UserError: the address is not valid.
        """
        assert self._socket is None, "connect twice"
        check_address(self._address)
        keys = curve.load_client(self._curve_dir)
        token = token_for(self._curve_dir, self._audience, self._hello.role, self._hello.name)
        self._hello = msgspec.structs.replace(self._hello, token=token)
        self._context = open_context()
        self._socket = ReadySocket(self._context, zmq.DEALER, self._on_ready)
        raw = self._socket.raw
        set_options(raw)
        raw.setsockopt(zmq.RECONNECT_IVL, 50)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        curve.enable_client(raw, keys)
        try:
            raw.connect(self._address)
        except zmq.ZMQError as error:
            await self.close()
            raise UserError(f"cannot connect: {error.strerror}", where=self._address) from error
        self._socket.attach()
        deadline_s = time.monotonic() + timeout_s
        while self._welcome is None and self._failure is None and (left_s := deadline_s - time.monotonic()) > 0:
            self._try_send(encode(self._hello))
            await self._arrived.wait(min(left_s, 1.0))
        welcome, failure = self._welcome, self._failure
        if welcome is None:
            await self.close()
            raise failure or DeadlineExceeded(
                "a reply to the connection request", f"the hub at {self._address}", timeout_s
            )
        self._beating = asyncio.create_task(self._beat(), name=f"heartbeat:{self._hello.name}")
        self._beating.add_done_callback(self._on_beat_end)
        return welcome

    async def receive(self, timeout_s: float) -> Message | None:
        """Wait for the next message. Cancelling this call loses no message.

        Args:
            timeout_s: longest wait.

        Returns:
            The message; None after `timeout_s`. A Welcome means that the hub has no record of this process, so messages
                must be resent.

        Raises:
            ChannelError: the hub refused this process.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._num_since_pause >= BURST:
            self._num_since_pause = 0
            await asyncio.sleep(0)
        while not self._inbox:
            self._drain()
            if self._inbox:
                break
            self._check()
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            self._num_since_pause = 0
            await self._arrived.wait(min(remaining_s, LISTEN_S))
        self._num_since_pause += 1
        return self._inbox.popleft()

    async def send(self, message: Message, timeout_s: float = 30.0) -> None:
        """Queue a message, waiting for room.

        Args:
            message: what to send.
            timeout_s: longest wait for room in the queue.

        Raises:
            DeadlineExceeded: there was no room.
            ChannelError: the hub refused this process.
        """
        frames = encode(message)
        num_bytes = sum(map(len, frames))
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._check()
            if self._has_window(num_bytes) and self._try_send(frames):
                self.counters["sent"] += 1
                return
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                wait = f"room to send {type(message).__name__}"
                raise DeadlineExceeded(wait, f"the hub at {self._address}", timeout_s)
            await self._writable.wait(min(remaining_s, LISTEN_S))

    async def close(self, reason: str = "") -> None:
        """Send Goodbye if registered, and close; queued messages are sent for up to LINGER_S."""
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            await asyncio.wait([beating], timeout=LINGER_S)
        if self._socket is not None:
            if self._welcome is not None and self._failure is None:
                self._try_send(encode(Goodbye(reason=reason)))
            self._socket.close()
            self._socket = None
        self._arrived.set()
        if self._context is not None:
            context, self._context = self._context, None
            await asyncio.to_thread(terminate, context)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._socket is None:
            raise ChannelError("the channel is closed")

    def _has_window(self, num_bytes: int) -> bool:
        """Whether the hub has read enough for this message to be sent (also True while this side does not read its
        reports)."""
        waiting_bytes = self._sent_bytes - self._read_bytes
        is_reading = len(self._inbox) < QUEUE_MESSAGES
        has_room = waiting_bytes + num_bytes <= WINDOW_BYTES or waiting_bytes <= WINDOW_BYTES // 4
        return has_room or not is_reading

    def _try_send(self, frames: list[Frame]) -> bool:
        """Queue one message after the secret of the registration, which identifies this peer on any connection."""
        assert self._socket is not None, "send before connect"
        registration = self._welcome.incarnation if self._welcome is not None else ""
        position = self._sent_bytes + sum(map(len, frames))
        try:
            self._socket.send([prefix(registration, position), *cut(frames)])
        except zmq.Again:
            return False
        self._sent_bytes = position
        return True

    def _on_ready(self, events: int) -> None:
        if events & zmq.POLLIN:
            self._drain()
        if events & zmq.POLLOUT:
            self._writable.set()

    def _drain(self) -> None:
        """Move messages from the socket to the inbox while there is room; the rest waits in the hub's bounded queue."""
        self._patience.tick()
        while (
            self._socket is not None
            and len(self._inbox) < QUEUE_MESSAGES
            and (frames := self._socket.receive()) is not None
        ):
            self._take(frames)

    def _take(self, frames: list[Frame]) -> None:
        self._received_s = self._patience.tick()
        self._unanswered = 0
        try:
            message = decode(join(frames, self._limits), self._accept, self._limits)
        except WireError as error:
            self.counters["rejected_malformed"] += 1
            self._warnings.log("refused a message from the hub", str(error))
            return
        self.counters["received"] += 1
        if isinstance(message, Heartbeat):
            if message.state == "stranger":
                self._try_send(encode(self._hello))
            else:
                self._read_bytes = max(self._read_bytes, int(message.counters.get(READ_BYTES, 0.0)))
                self._writable.set()
            return
        if isinstance(message, Refused):
            self._failure = ChannelError(f"the hub at {self._address} refused the connection: {message.reason}")
        elif isinstance(message, Welcome):
            previous, self._welcome = self._welcome, message
            if previous is not None and previous.incarnation != message.incarnation:
                self._inbox.append(message)
        else:
            self._inbox.append(message)
        self._arrived.set()

    async def _beat(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._drain()
            self._unanswered += 1
            turn += 1
            is_reading = len(self._inbox) < QUEUE_MESSAGES
            if self._unanswered <= self.UNANSWERED_BEATS or not is_reading:
                self._try_send(encode(self._status()))
            elif turn % 8 == 0:
                self._try_send(encode(self._hello))

    def _on_beat_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error if isinstance(error, Exception) else ChannelError(f"heartbeat ended: {error!r}")
            self._arrived.set()
