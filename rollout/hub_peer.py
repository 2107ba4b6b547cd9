"""The interface of a connection to a hub, so that tests can replace it. Connections are created in __main__.py."""

from __future__ import annotations

from typing import Protocol

from areal_like.wire.messages import Message, Welcome


class HubPeer(Protocol):
    """The part of `areal_like.channel.Peer` that this package uses."""

    @property
    def hub_silence_s(self) -> float: ...

    async def connect(self, timeout_s: float) -> Welcome: ...

    async def receive(self, timeout_s: float) -> Message | None: ...

    async def send(self, message: Message, timeout_s: float = 30.0) -> None: ...

    async def close(self, reason: str = "") -> None: ...
