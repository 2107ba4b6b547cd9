"""What a hub makes of each message, whom it refuses, and what it answers; over a socket that the test plays."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from channel_harness import hello, returned
from made_keys import run_keys
from socket_stand_in import StandIn, unreachable

from areal_like.errors import UserError
from areal_like.transport import hub as hub_module
from areal_like.transport.credentials import CANDIDATE, load_join_secret, token_for
from areal_like.transport.hub import MAX_NAME_CHARS, Hub
from areal_like.transport.sockets import BURST, LISTEN_S, READ_BYTES, WINDOW_BYTES, prefix
from areal_like.wire.encoding import WireLimits, cut, decode, encode, join
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, Message, Refused, SampleAck, SampleReturned, Welcome

ANSWERS = frozenset({Welcome, Refused, Heartbeat, SampleAck})
HALF = WINDOW_BYTES // 2


class Bench:
    def __init__(self, stand_in: StandIn) -> None:
        self.socket = stand_in
        self.hub = Hub(
            run_id="r", role="controller", bind="tcp://127.0.0.1:0", curve_dir=run_keys(),
            accept=frozenset({SampleReturned}),
        )  # fmt: skip

    def comes(self, route: bytes, message: Message, registration: str = "", position: int = 0) -> None:
        self.socket.inbox.append([route, prefix(registration, position), *cut(encode(message))])

    def hello(self, route: bytes, name: str = "rollout-0", incarnation: str = "a", position: int = 0) -> None:
        token = token_for(run_keys(), "controller", "rollout", name)
        self.comes(route, hello(name, incarnation, token=token), position=position)

    async def register(self, route: bytes, name: str = "rollout-0", incarnation: str = "a", position: int = 0) -> str:
        """The secret of the registration."""
        self.hello(route, name, incarnation, position)
        await self.hub.receive(0.0)
        ((_, welcome),) = self.answers()
        assert isinstance(welcome, Welcome)
        return welcome.incarnation

    async def receive(self) -> list[tuple[str, Message]]:
        """All that is passed up."""
        passed_up = []
        while self.socket.inbox:
            if (received := await self.hub.receive(0.0)) is not None:
                passed_up.append(received)
        while (received := await self.hub.receive(0.0)) is not None:
            passed_up.append(received)
        return passed_up

    def answers(self) -> list[tuple[bytes, Any]]:
        """What was sent since the last look, by route."""
        sent, self.socket.sent = self.socket.sent, []
        limits = WireLimits()
        return [(frames[0], decode(join(frames[1:], limits), ANSWERS, limits)) for frames in sent]

    def read_bytes(self) -> list[int]:
        """Positions that were reported since the last look."""
        return [int(answer.counters[READ_BYTES]) for _, answer in self.answers()]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


def with_hub(stand_in: StandIn, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(300.0):
            bench = Bench(stand_in)
            await bench.hub.start()
            try:
                await test(bench)
            finally:
                await bench.hub.close()

    asyncio.run(whole())


# ------------------------------------------------------------ life


def test_start_says_where_it_is_bound_and_close_gives_everything_back_once(stand_in: StandIn) -> None:
    async def test() -> None:
        bench = Bench(stand_in)
        await bench.hub.close()
        assert not stand_in.is_terminated
        assert await bench.hub.start() == f"tcp://bound:{zmq.LAST_ENDPOINT}"
        assert stand_in.is_attached
        assert stand_in.options[zmq.ROUTER_MANDATORY] == 1
        await bench.hub.close()
        assert (stand_in.is_closed, stand_in.is_door_closed, stand_in.is_terminated) == (True, True, True)
        stand_in.is_closed = stand_in.is_door_closed = stand_in.is_terminated = False
        await bench.hub.close()
        assert (stand_in.is_closed, stand_in.is_door_closed, stand_in.is_terminated) == (False, False, False)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EADDRINUSE, "port is in use"), (errno.EACCES, "cannot bind: Permission denied")]
)
def test_an_address_that_cannot_be_bound_says_why_and_leaves_nothing_open(
    stand_in: StandIn, number: int, words: str
) -> None:
    stand_in.bind_error = zmq.ZMQError(number)
    with pytest.raises(UserError, match=words):
        asyncio.run(Bench(stand_in).hub.start())
    assert (stand_in.is_closed, stand_in.is_door_closed, stand_in.is_terminated) == (True, True, True)
    assert not stand_in.is_attached


# ------------------------------------------------------------ registration


def test_a_hello_is_welcomed_and_passed_up_once_without_its_token(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        bench.hello(b"1")
        ((name, passed_up),) = await bench.receive()
        ((route, welcome),) = bench.answers()
        assert isinstance(passed_up, Hello)
        assert (name, passed_up.token, passed_up.incarnation) == ("rollout-0", "", "a")
        assert (route, welcome.run_id) == (b"1", "r")
        assert dict(bench.hub.counters) == {"received": 1, "sent": 1}
        bench.hello(b"1")
        assert await bench.receive() == []
        assert bench.answers() == [(b"1", welcome)], "the same registration"
        assert dict(bench.hub.counters) == {"received": 2, "sent": 2}

    with_hub(stand_in, test)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [("", False), ("a", True), ("a" * MAX_NAME_CHARS, True), ("a" * (MAX_NAME_CHARS + 1), False), ("a\n", False)],
)
def test_names_are_short_and_printable(stand_in: StandIn, name: str, is_taken: bool) -> None:
    async def test(bench: Bench) -> None:
        bench.hello(b"1", name)
        assert len(await bench.receive()) == is_taken
        ((_, answer),) = bench.answers()
        assert isinstance(answer, Welcome) == is_taken
        if not is_taken:
            assert answer.reason == f"a name must have 1 to {MAX_NAME_CHARS} printable characters"
            assert dict(bench.hub.counters) == {"rejected_hello": 1, "sent": 1}
            assert not bench.hub.peers

    with_hub(stand_in, test)


def test_a_full_hub_takes_nobody_new_but_those_it_knows(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_PEERS", 2)

    async def test(bench: Bench) -> None:
        for number in range(2):
            await bench.register(b"%d" % number, f"rollout-{number}")
        bench.hello(b"2", "rollout-2")
        assert await bench.receive() == []
        assert bench.answers() == [(b"2", Refused(reason="this hub already has 2 peers"))]
        await bench.register(b"3", "rollout-1", "b")
        bench.hub.forget("rollout-0")
        await bench.register(b"2", "rollout-2")
        assert set(bench.hub.peers) == {"rollout-1", "rollout-2"}

    with_hub(stand_in, test)


def test_candidates_leave_room_for_the_processes_of_the_run(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_CANDIDATES", 1)
    token = load_join_secret(run_keys(), "controller").token(CANDIDATE, CANDIDATE)

    async def test(bench: Bench) -> None:
        for number in range(2):
            one = hello(f"{CANDIDATE}/{number}", "a", token=token)
            bench.comes(b"c%d" % number, msgspec.structs.replace(one, role="candidate"))
        await bench.receive()
        assert bench.answers()[1] == (b"c1", Refused(reason="this hub already has 1 candidates"))
        await bench.register(b"0")
        assert set(bench.hub.peers) == {"candidate/0", "rollout-0"}

    with_hub(stand_in, test)


def test_a_hub_takes_as_many_peers_as_the_security_page_says(stand_in: StandIn) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert "| registered peers of one hub | 4,096, of which 1,024 candidates |" in page
    assert hub_module.MAX_CANDIDATES == 1024

    async def test(bench: Bench) -> None:
        await bench.register(b"0")
        one = bench.hub.peers["rollout-0"]
        bench.hub.peers.update({f"other-{number}": one for number in range(4094)})
        await bench.register(b"1", "rollout-1")
        bench.hello(b"2", "rollout-2")
        assert await bench.receive() == []
        assert bench.answers() == [(b"2", Refused(reason="this hub already has 4096 peers"))]

    with_hub(stand_in, test)


def test_replaced_processes_stay_refused_as_many_as_are_remembered(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MAX_RETIRED", 2)

    async def test(bench: Bench) -> None:
        for incarnation in ("a", "b", "c", "d"):
            await bench.register(b"1", incarnation=incarnation)
        for incarnation, is_refused in (("b", True), ("c", True), ("a", False)):
            bench.hello(b"2", incarnation=incarnation)
            await bench.receive()
            ((_, answer),) = bench.answers()
            assert isinstance(answer, Refused) == is_refused, incarnation

    with_hub(stand_in, test)


def test_a_connection_used_for_another_name_says_goodbye_for_the_first_before_anything_else(
    stand_in: StandIn,
) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1", "rollout-1")
        bench.hello(b"1", "rollout-2")
        (first, second) = await bench.receive()
        assert first == ("rollout-1", Goodbye(reason="the connection is now registered under the name rollout-2"))
        assert (second[0], type(second[1])) == ("rollout-2", Hello)
        assert set(bench.hub.peers) == {"rollout-2"}

    with_hub(stand_in, test)


def test_a_registration_moves_to_the_connection_that_shows_its_secret(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        registration = await bench.register(b"1")
        assert registration not in repr(bench.hub.peers)
        bench.comes(b"2", returned(lease_id=5), registration)
        ((name, message),) = await bench.receive()
        assert (name, message.lease_id) == ("rollout-0", 5)  # type: ignore[attr-defined]
        assert bench.hub.send("rollout-0", SampleAck(lease_ids=(5,)))
        assert [route for route, _ in bench.answers()] == [b"2"]
        bench.comes(b"1", returned(lease_id=6))
        assert await bench.receive() == [], "the old connection is nobody's"
        assert bench.hub.counters["rejected_unknown_peer"] == 1
        bench.hub.forget("rollout-0")
        bench.comes(b"2", returned(lease_id=7), registration)
        bench.comes(b"3", returned(lease_id=8), registration)
        assert await bench.receive() == [], "a registration ends with its peer"
        assert bench.hub.counters["rejected_unknown_peer"] == 3

    with_hub(stand_in, test)


def test_a_peer_that_registers_on_another_connection_leaves_the_old_one(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        bench.hello(b"2")
        assert await bench.receive() == []
        bench.comes(b"1", returned())
        assert await bench.receive() == []
        assert bench.hub.counters["rejected_unknown_peer"] == 1
        bench.comes(b"2", returned())
        assert len(await bench.receive()) == 1

    with_hub(stand_in, test)


# ------------------------------------------------------------ messages


def test_only_a_heartbeat_of_a_stranger_is_answered(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        bench.comes(b"1", returned())
        bench.comes(b"1", Heartbeat(state="generate"))
        assert await bench.receive() == []
        assert bench.answers() == [(b"1", Heartbeat(state="stranger"))]
        assert dict(bench.hub.counters) == {"rejected_unknown_peer": 2, "sent": 1}

    with_hub(stand_in, test)


@pytest.mark.parametrize("frames", [[b"1"], [b"1", b"x"], [b"1", prefix("", 0)], [b"1", prefix("", 0), b"\xc1"]])
def test_frames_that_are_no_message_are_refused(stand_in: StandIn, frames: list[bytes]) -> None:
    async def test(bench: Bench) -> None:
        stand_in.inbox.append(frames)
        assert await bench.receive() == []
        assert dict(bench.hub.counters) == {"rejected_malformed": 1}

    with_hub(stand_in, test)


def test_a_connection_without_the_key_is_counted(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        stand_in.on_stray("1.2.3.4")
        assert dict(bench.hub.counters) == {"rejected_key": 1}

    with_hub(stand_in, test)


def test_messages_and_heartbeats_count_and_heartbeats_are_kept_and_answered(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        bench.comes(b"1", Heartbeat(state="generate"), position=70)
        bench.comes(b"1", Goodbye(reason="done"))
        assert await bench.receive() == [("rollout-0", Goodbye(reason="done"))]
        assert bench.read_bytes() == [70]
        assert dict(bench.hub.counters) == {"received": 3, "sent": 2}
        assert not bench.hub.peers

    with_hub(stand_in, test)


def test_the_newest_heartbeat_is_what_is_known_of_a_peer(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        assert bench.hub.peers["rollout-0"].heartbeat is None
        for state in ("generate", "score"):
            bench.comes(b"1", Heartbeat(state=state))
        await bench.receive()
        assert bench.hub.peers["rollout-0"].heartbeat == Heartbeat(state="score")

    with_hub(stand_in, test)


def test_what_was_read_is_reported_after_every_half_of_the_window(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1", position=100)
        for position in (HALF - 1, HALF, HALF + 1, 2 * HALF - 1, 2 * HALF):
            bench.comes(b"1", returned(), position=position)
        await bench.receive()
        assert bench.read_bytes() == [HALF, 2 * HALF]
        stand_in.send_error = zmq.Again()
        bench.comes(b"1", returned(), position=3 * HALF)
        await bench.receive()
        stand_in.send_error = None
        bench.comes(b"1", returned(), position=3 * HALF + 1)
        await bench.receive()
        assert bench.read_bytes() == [3 * HALF + 1], "a report that could not be sent is made with the next message"

    with_hub(stand_in, test)


def test_a_message_goes_to_the_peers_connection_or_is_counted_as_lost(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        ack = SampleAck(lease_ids=(1,))
        assert not bench.hub.send("rollout-0", ack)
        await bench.register(b"1")
        before = dict(bench.hub.counters)
        assert bench.hub.send("rollout-0", ack)
        assert bench.answers() == [(b"1", ack)]
        stand_in.send_error = zmq.Again()
        assert not bench.hub.send("rollout-0", ack)
        stand_in.send_error = unreachable()
        assert not bench.hub.send("rollout-0", ack)
        counted = {name: count - before.get(name, 0) for name, count in bench.hub.counters.items()}
        assert counted == {"received": 0, "sent": 1, "queue_full": 1, "unroutable": 1}
        stand_in.send_error = zmq.ZMQError(errno.ENOTSOCK)
        with pytest.raises(zmq.ZMQError):
            bench.hub.send("rollout-0", ack)

    with_hub(stand_in, test)


# ------------------------------------------------------------ waiting


@pytest.mark.parametrize("timeout_s", [0.0, LISTEN_S, 3.5 * LISTEN_S])
def test_an_idle_hub_waits_its_whole_time_and_looks_up_in_between(stand_in: StandIn, timeout_s: float) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.hub.receive(timeout_s) is None
        assert sum(stand_in.waits) == pytest.approx(timeout_s)
        assert all(0 < wait_s <= LISTEN_S for wait_s in stand_in.waits)

    with_hub(stand_in, test)


def test_the_loop_gets_a_turn_after_every_burst_and_not_before(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def take(number: int) -> int:
            before = turns
            for _ in range(number):
                assert await bench.hub.receive(0.0) is not None
            return turns - before

        counting = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        for lease_id in range(3 * BURST):
            bench.comes(b"1", returned(lease_id=lease_id))
        assert await take(BURST - 1) == 0  # its Hello was the first of the burst
        assert await take(1) == 1
        assert await take(BURST - 1) == 0
        assert await take(1) == 1
        counting.cancel()

    with_hub(stand_in, test)


def test_a_burst_of_refused_messages_makes_no_pause_before_the_next_one(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        assert await bench.hub.receive(LISTEN_S) is None
        stand_in.waits.clear()
        stand_in.inbox.extend([[b"1"]] * BURST)
        bench.comes(b"1", returned())
        assert await bench.hub.receive(1.0) is not None
        assert stand_in.waits == []

    with_hub(stand_in, test)


def test_messages_wake_the_hub_and_room_to_send_does_not(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        stand_in.on_ready(zmq.POLLOUT)
        assert stand_in.num_signals == 0
        stand_in.on_ready(zmq.POLLIN | zmq.POLLOUT)
        assert stand_in.num_signals == 1

    with_hub(stand_in, test)


def test_a_peer_is_silent_once_longer_than_the_limit_and_every_message_ends_the_silence(stand_in: StandIn) -> None:
    async def test(bench: Bench) -> None:
        await bench.register(b"1")
        stand_in.clock.now_s += 0.5
        await bench.register(b"2", "rollout-1")
        assert bench.hub.peers["rollout-1"].last_seen_s == stand_in.clock.now_s
        stand_in.clock.now_s += 0.25
        assert bench.hub.silent(0.75) == []
        assert bench.hub.silent(0.5) == ["rollout-0"]
        bench.comes(b"1", returned())
        await bench.receive()
        assert bench.hub.peers["rollout-0"].last_seen_s == stand_in.clock.now_s
        assert bench.hub.silent(0.125) == ["rollout-1"]
        assert bench.hub.silent(0.25) == []

    with_hub(stand_in, test)
