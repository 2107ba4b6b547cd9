"""The parts that both ends of a channel are made of: signal, listening clock, warnings, addresses, the first frame."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from areal_like.errors import UserError
from areal_like.transport import sockets
from areal_like.transport.sockets import (
    MAX_TRANSPORT_FRAME_BYTES,
    QUEUE_MESSAGES,
    REGISTRATION_BYTES,
    ListeningClock,
    RateLimitedLog,
    ReadySocket,
    Signal,
    check_address,
    open_context,
    own_host,
    prefix,
    read_prefix,
    set_options,
    terminate,
)
from areal_like.wire.encoding import LARGE_BYTES, MAX_FRAME_BYTES

BOUNDS = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
"""Messages to users about the limits of a connection."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


# ------------------------------------------------------------ signal


def test_a_signal_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    async def test() -> None:
        signal = Signal()
        waiting = [asyncio.ensure_future(signal.wait(1000.0)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        signal.set()
        signal.set()
        assert await asyncio.gather(*waiting[1:]) == [True, True]
        assert await signal.wait(0.0) is False
        assert await signal.wait(-1.0) is False

    asyncio.run(test())


# ------------------------------------------------------------ patience


def test_time_counts_in_which_we_listened_and_a_gap_counts_for_a_second(clock: Any) -> None:
    patience = ListeningClock()
    assert patience.tick() == 0.0
    for elapsed_s, listened_s in ((0.25, 0.25), (1.0, 1.25), (60.0, 2.25), (0.5, 2.75)):
        clock.now_s += elapsed_s
        assert patience.tick() == listened_s
        assert patience.tick() == listened_s, "no time has passed"


# ------------------------------------------------------------ warnings


def test_one_line_of_a_kind_is_logged_in_ten_seconds_and_names_how_many_were_not(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = RateLimitedLog(logging.getLogger("hub"))
    with caplog.at_level(logging.WARNING):
        for kind, text, elapsed_s in (
            ("a", "1", 0.0), ("a", "2", 9.75), ("b", "3", 0.0), ("a", "4", 0.0), ("a", "5", 0.25), ("a", "6", 10.0),
        ):  # fmt: skip
            clock.now_s += elapsed_s
            warnings.log(kind, text)
    assert [record.getMessage() for record in caplog.records] == [
        "a: 1",
        "b: 3",
        "a: 5 (2 similar messages were suppressed)",
        "a: 6",
    ]


# ------------------------------------------------------------ addresses and frames


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:4000", "tcp://host:*"])
def test_addresses_of_tcp_are_taken(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["", "127.0.0.1:1", "ipc://host:1", "tcp://", "tcp://host", "tcp:host:1"])
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(UserError, match="invalid address"):
        check_address(address)


def test_the_way_to_the_controller_names_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Probe:
        def __init__(self, family: int, kind: int) -> None:
            self.family = family
            assert kind == socket.SOCK_DGRAM

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            asked.append("closed")

        def connect(self, target: tuple[str, int]) -> None:
            asked.append((self.family, *target))
            if target[0] == "nowhere":
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return "fe80::1" if self.family == socket.AF_INET6 else "10.0.0.5", 1234

    monkeypatch.setattr(sockets.socket, "socket", Probe)
    assert own_host("tcp://10.0.0.1:4000") == "10.0.0.5"
    assert own_host("tcp://[fe80::2]:4000") == "[fe80::1]"
    with pytest.raises(UserError, match="no network route to the controller: Network is unreachable"):
        own_host("tcp://nowhere:4000")
    assert own_host("tcp://") == "10.0.0.5"
    assert asked == [
        (socket.AF_INET, "10.0.0.1", 4000), "closed", (socket.AF_INET6, "fe80::2", 4000), "closed",
        (socket.AF_INET, "nowhere", 4000), "closed", (socket.AF_INET, "127.0.0.1", 1), "closed",
    ]  # fmt: skip


def test_the_first_frame_is_read_as_it_was_written() -> None:
    for registration, position in (("", 0), ("a" * REGISTRATION_BYTES, 2**63), ("abc", 5)):
        frame = prefix(registration, position)
        assert read_prefix(frame) == (registration.encode(), position)
        assert read_prefix(frame + b"x") == (b"", 0)
        assert read_prefix(frame[:-1]) == (b"", 0)


# ------------------------------------------------------------ sockets


def test_a_connection_holds_little_and_a_dead_one_is_found_within_a_minute() -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        set_options(raw)
        options = {name: raw.getsockopt(getattr(zmq, name)) for name in (
            "SNDHWM", "RCVHWM", "MAXMSGSIZE", "HANDSHAKE_IVL", "TCP_KEEPALIVE", "TCP_KEEPALIVE_IDLE",
            "TCP_KEEPALIVE_INTVL", "TCP_KEEPALIVE_CNT",
        )}  # fmt: skip
    assert options == {
        "SNDHWM": QUEUE_MESSAGES, "RCVHWM": 16, "MAXMSGSIZE": 512 * 1024,
        "HANDSHAKE_IVL": 10_000, "TCP_KEEPALIVE": 1, "TCP_KEEPALIVE_IDLE": 30, "TCP_KEEPALIVE_INTVL": 10,
        "TCP_KEEPALIVE_CNT": 3,
    }  # fmt: skip
    assert MAX_TRANSPORT_FRAME_BYTES == 512 * 1024 > MAX_FRAME_BYTES
    assert "| one frame, also before the handshake | 512 KiB;" in BOUNDS
    assert "| messages of one connection that were received and not read | 16 |" in BOUNDS
    assert "| handshake | 10 seconds |" in BOUNDS


def test_a_ready_socket_sends_receives_and_says_when_it_is_ready_until_it_is_closed() -> None:
    async def test() -> None:
        context = open_context()
        seen: list[int] = []
        looked = asyncio.Event()

        def on_ready(events: int) -> None:
            seen.append(events)
            looked.set()

        ends = [ReadySocket(context, zmq.PAIR, on_ready if number == 0 else lambda _: None) for number in range(2)]
        assert [end.raw.getsockopt(zmq.LINGER) for end in ends] == [1000, 1000]
        ends[0].raw.bind("inproc://pair")
        ends[1].raw.connect("inproc://pair")
        for end in ends:
            end.attach()
        assert ends[0].receive() is None
        small, large = b"a" * (LARGE_BYTES - 1), b"b" * LARGE_BYTES
        ends[1].send([small, large])
        assert seen == [], "never from inside"
        async with asyncio.timeout(300.0):
            while not any(events & zmq.POLLIN for events in seen):
                looked.clear()
                await looked.wait()
        frames = ends[0].receive()
        assert frames is not None
        assert [type(frame) for frame in frames] == [bytes, memoryview]
        assert [bytes(frame) for frame in frames] == [small, large]
        seen.clear()
        ends[0].send([b"x"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen, "a look at the events follows every send"
        ends[0].send([b"y"])
        seen.clear()
        for end in ends:
            end.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == [], "nothing is said of a closed socket"
        terminate(context)
        assert context.closed

    asyncio.run(test())
