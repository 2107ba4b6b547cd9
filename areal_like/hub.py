"""The hub end of a channel: one ROUTER that many peers register with.

Owns: registration, who is alive, routing, refusing whatever is malformed or unasked for. Refuses: resending and credits
(the owner's), raising for anything a peer did. See channel.py for how both ends work together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import secrets
import time
from collections import Counter, OrderedDict
from pathlib import Path

import zmq

from areal_like import curve
from areal_like.errors import UserError, WireError
from areal_like.messages import PROTOCOL, Goodbye, Heartbeat, Hello, Message, Refused, Role, Welcome
from areal_like.sockets import (
    BURST,
    LISTEN_S,
    Complaints,
    PatienceClock,
    ReadySocket,
    Signal,
    bound_queues,
    check_address,
)
from areal_like.wire import Frame, WireLimits, decode, encode

log = logging.getLogger(__name__)

MAX_PEERS = 4096
MAX_NAME_CHARS = 100
MAX_RETIRED = 4096
"""Replaced incarnations remembered, so that an old process cannot push out its successor."""

_KNOWN = encode(Heartbeat(state="known"))
_STRANGER = encode(Heartbeat(state="stranger"))


@dataclasses.dataclass
class PeerInfo:
    """What the hub knows of a registered peer. `last_seen_s` is monotonic; `heartbeat` the newest one."""

    name: str
    role: Role
    pid: int
    incarnation: str
    route: bytes
    registration: str
    last_seen_s: float
    listened_s: float
    heartbeat: Heartbeat | None = None


class Hub:
    """The ROUTER end. Used from one event loop. Messages of unregistered peers are refused."""

    def __init__(
        self,
        *,
        run_id: str,
        role: Role,
        bind: str,
        curve_dir: Path | None,
        accept: frozenset[type],
        limits: WireLimits | None = None,
    ) -> None:
        self.peers: dict[str, PeerInfo] = {}
        self.counters: Counter[str] = Counter()
        self.incarnation = secrets.token_hex(8)
        self._run_id, self._role, self._bind, self._curve_dir = run_id, role, bind, curve_dir
        self._accept = accept | {Hello, Heartbeat, Goodbye}
        self._limits = limits or WireLimits()
        self._names: dict[bytes, str] = {}
        self._retired: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_registrations = 0
        self._num_since_pause = 0
        self._readable = Signal()
        self._patience = PatienceClock()
        self._complaints = Complaints(log)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: ReadySocket | None = None
        self._door: curve.Door | None = None

    async def start(self) -> str:
        """Bind; returns the real address (port 0 is resolved). Raises UserError when that cannot be."""
        check_address(self._bind, is_encrypted=self._curve_dir is not None)
        keys = curve.load_server(self._curve_dir) if self._curve_dir is not None else None
        self._context = zmq.Context()
        self._socket = ReadySocket(self._context, zmq.ROUTER, self._on_ready)
        raw = self._socket.raw
        bound_queues(raw, self._limits)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        raw.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes its half-dead old connection over
        if keys is not None:
            self._door = curve.Door(self._context, keys, self._on_stray)
            self._door.guard(raw)
        try:
            raw.bind(self._bind)
        except zmq.ZMQError as error:
            await self.close()
            what = "port is in use" if error.errno == errno.EADDRINUSE else f"cannot bind: {error.strerror}"
            raise UserError(what, where=self._bind, remedy="choose another port, or 0 for a free one") from error
        self._socket.attach()
        return raw.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """The next (peer name, message), or None after `timeout_s`. A Hello was answered before it is passed up.

        Heartbeats are kept in `peers`, not passed up. Refused messages are counted and logged, never raised.
        Cancelling it loses nothing.
        """
        assert self._socket is not None, "receive before start"
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._patience.tick()
            if self._num_since_pause >= BURST:
                self._num_since_pause = 0
                await asyncio.sleep(0)
            while self._num_since_pause < BURST and (frames := self._socket.receive()) is not None:
                self._num_since_pause += 1
                taken = self._take(frames)
                if taken is not None:
                    return taken
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            if self._num_since_pause < BURST:
                await self._readable.wait(min(remaining_s, LISTEN_S))
                self._num_since_pause = 0

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message. False (and counted) when the peer is unknown or gone, or its queue is full."""
        info = self.peers.get(peer)
        if info is None:
            self.counters["unroutable"] += 1
            return False
        return self._send_frames(info.route, encode(message))

    def silent(self, silence_s: float) -> list[str]:
        """Peers not heard of during the last `silence_s` seconds of our listening."""
        listened_s = self._patience.tick()
        return [name for name, info in self.peers.items() if listened_s - info.listened_s > silence_s]

    def forget(self, peer: str) -> None:
        """Strike a peer off. If it still lives, its next heartbeat makes it say Hello again, which is passed up."""
        info = self.peers.pop(peer, None)
        if info is not None:
            self._names.pop(info.route, None)

    async def close(self) -> None:
        """Close; queued messages get LINGER_S to leave."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._context is not None:
            context, self._context = self._context, None
            await asyncio.to_thread(context.term)

    def _on_ready(self, events: int) -> None:
        if events & zmq.POLLIN:
            self._readable.set()

    def _on_stray(self, address: str) -> None:
        self._reject("key", f"a connection from {address} without this run's key")

    def _reject(self, kind: str, text: str) -> None:
        self.counters[f"rejected_{kind}"] += 1
        self._complaints.say(f"{self._role} hub refused ({kind})", text)

    def _send_frames(self, route: bytes, frames: list[Frame]) -> bool:
        assert self._socket is not None, "send before start"
        try:
            self._socket.send([route, *frames])
        except zmq.Again:
            self.counters["queue_full"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters["unroutable"] += 1
            return False
        self.counters["sent"] += 1
        return True

    def _take(self, frames: list[Frame]) -> tuple[str, Message] | None:
        """What one raw message means for the owner; None when it was ours to deal with, or refused."""
        route = bytes(frames[0])
        name = self._names.get(route)
        try:
            message = decode(frames[1:], self._accept, self._limits)
        except WireError as error:
            self._reject("malformed", f"from {name or 'an unknown peer'}: {error}")
            return None
        if isinstance(message, Hello):
            return self._register(route, message)
        if name is None:
            self._reject("unknown_peer", f"{type(message).__name__} from a peer that has not said Hello")
            if isinstance(message, Heartbeat):
                self._send_frames(route, _STRANGER)
            return None
        self.counters["received"] += 1
        info = self.peers[name]
        self._saw(info)
        if isinstance(message, Heartbeat):
            info.heartbeat = message
            self._send_frames(route, _KNOWN)
            return None
        if isinstance(message, Goodbye):
            self.forget(name)
        return name, message

    def _saw(self, info: PeerInfo) -> None:
        info.last_seen_s = time.monotonic()
        info.listened_s = self._patience.tick()

    def _register(self, route: bytes, hello: Hello) -> tuple[str, Message] | None:
        reason = self._objection(hello)
        if reason:
            self._reject("hello", f"{hello.name[:MAX_NAME_CHARS]!r}: {reason}")
            self._send_frames(route, encode(Refused(reason=reason)))
            return None
        self.counters["received"] += 1
        known = self.peers.get(hello.name)
        is_new = known is None or known.incarnation != hello.incarnation
        if known is not None and is_new:
            self._retired[known.name, known.incarnation] = None
            if len(self._retired) > MAX_RETIRED:
                self._retired.popitem(last=False)
        if known is not None and known.route != route:
            self._names.pop(known.route, None)
        if self._names.get(route, hello.name) != hello.name:
            self.forget(self._names[route])  # one connection carries one name: the newest
        if known is None or is_new:
            self._num_registrations += 1
            registration = f"{self.incarnation}.{self._num_registrations}"
            known = PeerInfo(hello.name, hello.role, hello.pid, hello.incarnation, route, registration, 0.0, 0.0)
            self.peers[hello.name] = known
        known.route = route
        self._names[route] = hello.name
        self._saw(known)
        self._send_frames(route, encode(Welcome(run_id=self._run_id, incarnation=known.registration)))
        return (hello.name, hello) if is_new else None

    def _objection(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol}, this run speaks {PROTOCOL}"
        if hello.run_id != self._run_id:
            return f"run {hello.run_id[:MAX_NAME_CHARS]!r}, this is {self._run_id!r}"
        if not 0 < len(hello.name) <= MAX_NAME_CHARS or not hello.name.isprintable():
            return f"a name must have 1 to {MAX_NAME_CHARS} printable characters"
        if (hello.name, hello.incarnation) in self._retired:
            return f"{hello.name} was replaced by a newer process of that name"
        if hello.name not in self.peers and len(self.peers) >= MAX_PEERS:
            return f"this hub has {MAX_PEERS} peers already"
        return ""
