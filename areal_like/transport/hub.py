"""The hub end of a channel: one ROUTER that many peers register with.

It registers peers, tracks which are alive, routes messages, and drops malformed or unexpected ones. It raises no
exception for anything that a peer sends. channel.py describes how both ends work together. See channel.py for how both
ends work together.

Permissions: a connection needs the run's client key: others are refused during the handshake (curve.py). A Hello needs
the token of its role and name (credentials.py); until one is accepted every other message is dropped. Routes are made
by the hub's own socket, one for each connection, and cannot be chosen by a peer. A registration moves to another
connection only with its secret (a reconnect) or with a Hello (a new process), which has the name's token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import secrets
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path

import msgspec
import zmq

from areal_like.errors import UserError, WireError
from areal_like.transport import curve
from areal_like.transport.credentials import CANDIDATE, JoinSecret, load_join_secret, token_name
from areal_like.transport.sockets import (
    BURST,
    LISTEN_S,
    READ_BYTES,
    WINDOW_BYTES,
    ListeningClock,
    RateLimitedLog,
    ReadySocket,
    Signal,
    check_address,
    open_context,
    read_prefix,
    set_options,
    terminate,
)
from areal_like.wire.encoding import Frame, WireLimits, cut, decode, encode, join
from areal_like.wire.messages import PROTOCOL, Goodbye, Heartbeat, Hello, Message, Refused, Role, Welcome

log = logging.getLogger(__name__)

MAX_PEERS = 4096
MAX_CANDIDATES = 1024
"""Number of peers that may be candidates. They choose their own names, and must leave room for the run's processes."""
MAX_NAME_CHARS = 100
MAX_RETIRED = 4096
"""Number of replaced incarnations that are remembered, so that an old process cannot replace its successor."""

_STRANGER = encode(Heartbeat(state="stranger"))


@dataclasses.dataclass
class PeerInfo:
    """State of a registered peer. `last_seen_s` is monotonic; `heartbeat` is the newest one."""

    name: str
    role: Role
    pid: int
    incarnation: str
    route: bytes
    registration: str = dataclasses.field(repr=False)
    """Identifies this registration; secret."""
    last_seen_s: float = dataclasses.field(init=False)
    listened_s: float = dataclasses.field(init=False)
    heartbeat: Heartbeat | None = None
    position: int = dataclasses.field(init=False)
    """Number of bytes that the peer had sent with the newest message that was read."""
    reported_position: int = 0
    """The last value of `position` that was sent to the peer."""


class Hub:
    """The ROUTER end. Used from one event loop. Messages of unregistered peers are refused."""

    def __init__(
        self,
        *,
        run_id: str,
        role: Role,
        bind: str,
        curve_dir: Path,
        accept: frozenset[type],
        limits: WireLimits | None = None,
    ) -> None:
        self.peers: dict[str, PeerInfo] = {}
        self.counters: Counter[str] = Counter()
        self.incarnation = secrets.token_hex(8)
        self._run_id, self._role, self._bind, self._curve_dir = run_id, role, bind, curve_dir
        self._accept = accept | {Hello, Heartbeat, Goodbye}
        self._limits = limits or WireLimits()
        self._join: JoinSecret | None = None
        self._names: dict[bytes, str] = {}
        """Registered name by route."""
        self._registered: dict[bytes, str] = {}
        """Registered name by registration."""
        self._pending: deque[tuple[str, Message]] = deque()
        """Messages that `receive` returns first."""
        self._retired: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._num_since_pause = 0
        self._readable = Signal()
        self._patience = ListeningClock()
        self._warnings = RateLimitedLog(log)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: ReadySocket | None = None
        self._authenticator: curve.Authenticator | None = None

    async def start(self) -> str:
        """Bind the socket.

        Returns:
            The bound address, with the real port.

        Raises:
            UserError: the address cannot be bound.
        """
        check_address(self._bind)
        keys = curve.load_server(self._curve_dir)
        self._join = load_join_secret(self._curve_dir, "controller" if self._role == "controller" else "services")
        self._context = open_context()
        self._socket = ReadySocket(self._context, zmq.ROUTER, self._on_ready)
        raw = self._socket.raw
        set_options(raw)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._authenticator = curve.Authenticator(self._context, keys, self._on_stray)
        self._authenticator.enable_server(raw)
        try:
            raw.bind(self._bind)
        except zmq.ZMQError as error:
            await self.close()
            what = "the port is in use" if error.errno == errno.EADDRINUSE else f"cannot bind: {error.strerror}"
            raise UserError(
                what, where=self._bind, remedy="use a different port or address; port 0 chooses any free port"
            ) from error
        self._socket.attach()
        return raw.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """Wait for the next message. A Hello is answered before it is returned; heartbeats are stored in `peers`.

        Refused messages are counted and logged. Cancelling this call loses no message.

        Args:
            timeout_s: longest wait.

        Returns:
            The peer's name and its message; None after `timeout_s`.
        """
        assert self._socket is not None, "receive before start"
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._patience.tick()
            if self._pending:
                return self._pending.popleft()
            if self._num_since_pause >= BURST:
                self._num_since_pause = 0
                await asyncio.sleep(0)
            while self._num_since_pause < BURST and (frames := self._socket.receive()) is not None:
                self._num_since_pause += 1
                taken = self._take(frames)
                if self._pending:  # they arrived earlier
                    self._pending.extend([taken] if taken is not None else [])
                    return self._pending.popleft()
                if taken is not None:
                    return taken
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            if self._num_since_pause < BURST:
                await self._readable.wait(min(remaining_s, LISTEN_S))
                self._num_since_pause = 0

    def send(self, peer: str, message: Message) -> bool:
        """Queue a message.

        Args:
            peer: name of a registered peer.
            message: what to send.

        Returns:
            False if the peer is unknown or disconnected, or its queue is full; such messages are counted.
        """
        info = self.peers.get(peer)
        if info is None:
            self.counters["unroutable"] += 1
            return False
        return self._send_frames(info.route, encode(message))

    def silent(self, silence_s: float) -> list[str]:
        """Peers that sent nothing for a while.

        Args:
            silence_s: seconds, counted only while this process was listening.

        Returns:
            Their names.
        """
        listened_s = self._patience.tick()
        return [name for name, info in self.peers.items() if listened_s - info.listened_s > silence_s]

    def forget(self, peer: str) -> None:
        """Remove a peer. If it is still running, it sends Hello again after its next heartbeat, which `receive`
        returns.

        Args:
            peer: its name; unknown names are ignored.
        """
        info = self.peers.pop(peer, None)
        if info is not None:
            self._names.pop(info.route, None)
            self._registered.pop(info.registration.encode(), None)

    async def close(self) -> None:
        """Close; queued messages are sent for up to LINGER_S."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        if self._context is not None:
            context, self._context = self._context, None
            await asyncio.to_thread(terminate, context)

    def _on_ready(self, events: int) -> None:
        if events & zmq.POLLIN:
            self._readable.set()

    def _on_stray(self, address: str) -> None:
        self._reject("key", f"a connection from {address} without the key for this hub")

    def _reject(self, kind: str, text: str) -> None:
        self.counters[f"rejected_{kind}"] += 1
        self._warnings.log(f"{self._role} hub refused ({kind})", text)

    def _send_frames(self, route: bytes, frames: list[Frame]) -> bool:
        assert self._socket is not None, "send before start"
        try:
            self._socket.send([route, *cut(frames)])
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
        """Process one raw message; None if it is handled here or refused."""
        route = bytes(frames[0])
        registration, position = read_prefix(frames[1]) if len(frames) > 1 else (b"", 0)
        name = self._names.get(route) or self._continued(route, registration)
        if name is not None:
            self._has_read(self.peers[name], position)
        try:
            message = decode(join(frames[2:], self._limits), self._accept, self._limits)
        except WireError as error:
            self._reject("malformed", f"from {name or 'an unknown peer'}: {error}")
            return None
        if isinstance(message, Hello):
            return self._register(route, message, position)
        if name is None:
            self._reject("unknown_peer", f"{type(message).__name__} from a peer that has not registered (Hello)")
            if isinstance(message, Heartbeat):
                self._send_frames(route, _STRANGER)
            return None
        self.counters["received"] += 1
        info = self.peers[name]
        self._saw(info)
        if isinstance(message, Heartbeat):
            info.heartbeat = message
            self._report_position(info)
            return None
        if isinstance(message, Goodbye):
            self.forget(name)
        return name, message

    def _continued(self, route: bytes, registration: bytes) -> str | None:
        """The name of a registered peer that has reconnected, by the secret of its registration; None for others."""
        name = self._registered.get(registration)
        if name is not None:
            self._move(self.peers[name], route)
        return name

    def _move(self, info: PeerInfo, route: bytes) -> None:
        """Route the peer's messages to this connection from now on."""
        if self._names.get(info.route) == info.name:
            del self._names[info.route]
        info.route = route
        self._names[route] = info.name

    def _has_read(self, info: PeerInfo, position: int) -> None:
        """Report the position once half a window was read, so that the peer can send without waiting for its next
        heartbeat."""
        info.position = position
        if position - info.reported_position >= WINDOW_BYTES // 2:
            self._report_position(info)

    def _report_position(self, info: PeerInfo) -> None:
        known = Heartbeat(state="known", counters={READ_BYTES: float(info.position)})
        if self._send_frames(info.route, encode(known)):
            info.reported_position = info.position

    def _saw(self, info: PeerInfo) -> None:
        info.last_seen_s = time.monotonic()
        info.listened_s = self._patience.tick()

    def _register(self, route: bytes, hello: Hello, position: int) -> tuple[str, Message] | None:
        reason = self._objection(hello)
        if reason:
            self._reject("hello", f"{hello.name[:MAX_NAME_CHARS]!r}: {reason}")
            self._send_frames(route, encode(Refused(reason=reason)))
            return None
        self.counters["received"] += 1
        hello = msgspec.structs.replace(hello, token="")
        known = self.peers.get(hello.name)
        is_new = known is None or known.incarnation != hello.incarnation
        if known is not None and is_new:
            self._retired[known.name, known.incarnation] = None
            if len(self._retired) > MAX_RETIRED:
                self._retired.popitem(last=False)
            self.forget(known.name)
        other = self._names.get(route, hello.name)
        if other != hello.name:  # a connection has one name: the newest
            self.forget(other)
            self._pending.append(
                (other, Goodbye(reason=f"the connection is now registered under the name {hello.name}"))
            )
        if known is None or is_new:
            registration = secrets.token_hex(16)
            known = PeerInfo(hello.name, hello.role, hello.pid, hello.incarnation, route, registration)
            self.peers[hello.name] = known
            self._registered[registration.encode()] = hello.name
        known.position = position
        self._move(known, route)
        self._saw(known)
        self._send_frames(route, encode(Welcome(run_id=self._run_id, incarnation=known.registration)))
        return (hello.name, hello) if is_new else None

    def _num_candidates(self) -> int:
        return sum(info.role == CANDIDATE for info in self.peers.values())

    def _objection(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol}, this run uses {PROTOCOL}"
        if hello.run_id != self._run_id:
            return f"run {hello.run_id[:MAX_NAME_CHARS]!r}, this is {self._run_id!r}"
        if not 0 < len(hello.name) <= MAX_NAME_CHARS or not hello.name.isprintable():
            return f"a name must have 1 to {MAX_NAME_CHARS} printable characters"
        assert self._join is not None, "registered before start"
        if not self._join.is_valid(hello.token, hello.role, token_name(hello.role, hello.name)):
            return (
                f"no token for {hello.role} {hello.name}: the process was not started by this run, or its keys are old"
            )
        if (hello.name, hello.incarnation) in self._retired:
            return f"{hello.name} was replaced by a newer process of that name"
        if hello.name not in self.peers and len(self.peers) >= MAX_PEERS:
            return f"this hub already has {MAX_PEERS} peers"
        if hello.role == CANDIDATE and hello.name not in self.peers and self._num_candidates() >= MAX_CANDIDATES:
            return f"this hub already has {MAX_CANDIDATES} candidates"
        return ""
