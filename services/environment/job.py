"""Messages between the reward service and one environment process.

Framing is in services/processes/framing.py.

    service -> process    HostSetup once; then for each episode Begin, Acts, one at a time, and Close
    process -> service    HostReady or HostRefusal once; then one Answered or Failed for each Begin and Act
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from areal_like.environment import Action, Step

FailureKind = Literal["timed_out", "crashed", "invalid"]


class HostSetup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """First message to an environment process. settings: `EnvironmentSettings` as a dict."""

    settings: dict[str, Any]
    service_pid: int


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Create an environment and reset it."""

    episode: int
    row: dict[str, Any]
    seed: int


class Act(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One action."""

    episode: int
    action: Action


class Close(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The episode has ended, for whatever reason. There is no reply."""

    episode: int


class HostReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The class is imported."""


class HostRefusal(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The environment cannot be used as configured: the user's mistake, in one sentence."""

    sentence: str


class Answered(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The environment's reply."""

    episode: int
    step: Step


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The call failed, and the environment was removed from the process.

    is_left: parts of it may remain, so the process accepts no further episodes.
    """

    episode: int
    kind: FailureKind
    reason: str
    is_left: bool = False


_to_process = msgspec.msgpack.Decoder(HostSetup | Begin | Act | Close)
_to_service = msgspec.msgpack.Decoder(HostReady | HostRefusal | Answered | Failed)


def decode_for_process(body: bytes) -> HostSetup | Begin | Act | Close:
    """Decode a message. Raises msgspec.MsgspecError."""
    return _to_process.decode(body)


def decode_for_service(body: bytes) -> HostReady | HostRefusal | Answered | Failed:
    """Decode a message. Raises msgspec.MsgspecError."""
    return _to_service.decode(body)
