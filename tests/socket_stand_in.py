"""Both ends of a channel over a socket, a clock and waits that the test plays: every boundary can be met exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from areal_like.transport import hub as hub_module
from areal_like.transport import peer as peer_module
from areal_like.transport import sockets


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class StandIn:
    """What hub and peer use of sockets; `waits` are the seconds of each wait, which pass at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.waits: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.num_signals = 0
        self.inbox: deque[list[Any]] = deque()
        self.sent: list[list[Any]] = []
        self.send_error: Exception | None = None
        self.bind_error: Exception | None = None
        self.options: dict[int, int] = {}
        self.is_attached = self.is_closed = self.is_terminated = self.is_door_closed = False
        self.on_ready: Callable[[int], None] = lambda events: None
        for module in (hub_module, peer_module):
            monkeypatch.setattr(module, "ReadySocket", self.socket)
            monkeypatch.setattr(module, "Signal", self.signal)
            monkeypatch.setattr(module, "open_context", lambda: "context")
            monkeypatch.setattr(module, "terminate", self._terminate)
            monkeypatch.setattr(module, "time", self.clock)
        monkeypatch.setattr(sockets, "time", self.clock)
        monkeypatch.setattr(hub_module.curve, "Authenticator", self._door)
        monkeypatch.setattr(peer_module.curve, "enable_client", lambda raw, keys: None)

    def socket(self, context: str, kind: int, on_ready: Callable[[int], None]) -> Any:
        assert context == "context"
        self.on_ready = on_ready
        raw = SimpleNamespace(
            setsockopt=self.options.__setitem__, bind=self._bind, connect=self._bind,
            getsockopt_string=lambda option: f"tcp://bound:{option}",
        )  # fmt: skip
        return SimpleNamespace(raw=raw, attach=self._attach, receive=self._receive, send=self._send, close=self._close)

    def signal(self) -> Any:
        return SimpleNamespace(set=self._set, wait=self._wait)

    async def _wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self.clock.now_s += timeout_s
        self.on_wait()
        return False

    def _set(self) -> None:
        self.num_signals += 1

    def _bind(self, address: str) -> None:
        if self.bind_error is not None:
            raise self.bind_error

    def _attach(self) -> None:
        self.is_attached = True

    def _receive(self) -> list[Any] | None:
        return self.inbox.popleft() if self.inbox else None

    def _send(self, frames: list[Any]) -> None:
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(list(frames))

    def _close(self) -> None:
        self.is_closed = True

    def _terminate(self, context: str) -> None:
        assert context == "context"
        self.is_terminated = True

    def _door(self, context: str, keys: Any, on_stray: Callable[[str], None]) -> Any:
        self.on_stray = on_stray
        return SimpleNamespace(enable_server=lambda raw: None, close=self._close_door)

    def _close_door(self) -> None:
        self.is_door_closed = True


def unreachable() -> zmq.ZMQError:
    """What a ROUTER says of a route that leads nowhere."""
    return zmq.ZMQError(zmq.EHOSTUNREACH)
