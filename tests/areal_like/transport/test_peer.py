"""What a peer sends and when it waits, what it makes of each answer; over a socket and a clock that the test plays."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
from channel_harness import hello, returned
from made_keys import run_keys
from socket_stand_in import StandIn

from areal_like.errors import ChannelError, DeadlineExceeded, UserError
from areal_like.transport import peer as peer_module
from areal_like.transport.credentials import token_for
from areal_like.transport.peer import Peer
from areal_like.transport.sockets import BURST, LISTEN_S, QUEUE_MESSAGES, READ_BYTES, WINDOW_BYTES, read_prefix
from areal_like.wire.encoding import WireLimits, cut, decode, encode, join
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, Message, Refused, SampleAck, SampleReturned, Welcome

SENT = frozenset({Hello, Heartbeat, Goodbye, SampleReturned})
ACK = SampleAck(lease_ids=(1,))
PATIENCE_S = 300.0


def size(message: Message) -> int:
    return sum(map(len, encode(message)))


class Bench:
    def __init__(self, socket: StandIn) -> None:
        self.socket = socket
        self.turns: asyncio.Queue[float] = asyncio.Queue()
        self.num_asked = 0
        self.status_error: Exception | None = None
        self.peer = Peer(
            address="tcp://127.0.0.1:9", hello=hello(), curve_dir=run_keys(), audience="controller",
            accept=frozenset({SampleAck}), heartbeat_s=0.0, silence_s=1.0, status=self.status,
        )  # fmt: skip

    def status(self) -> Heartbeat:
        if self.status_error is not None:
            raise self.status_error
        self.num_asked += 1
        return Heartbeat(state="generate")

    def comes(self, *messages: Message) -> None:
        for message in messages:
            self.socket.inbox.append(cut(encode(message)))

    def known(self, position: int) -> None:
        """The hub has read so many bytes."""
        self.comes(Heartbeat(state="known", counters={READ_BYTES: float(position)}))
        self.socket.on_ready(zmq.POLLIN)

    def sent(self) -> list[Message]:
        sent, self.socket.sent = self.socket.sent, []
        limits = WireLimits()
        self.prefixes = [read_prefix(frames[0]) for frames in sent]
        return [decode(join(frames[1:], limits), SENT, limits) for frames in sent]

    async def connect(self) -> None:
        self.comes(Welcome(run_id="r", incarnation="secret"))
        self.socket.on_wait = lambda: self.socket.on_ready(zmq.POLLIN)
        await self.peer.connect(PATIENCE_S)
        self.socket.on_wait = lambda: None
        self.sent()
        self.socket.waits.clear()

    async def beat(self, number: int = 1) -> None:
        """So many heartbeats of the peer become due."""
        for _ in range(number):
            self.due.release()
            for _ in range(4):
                await asyncio.sleep(0)

    @property
    def due(self) -> asyncio.Semaphore:
        return self.socket.due  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(monkeypatch)


@pytest.fixture
def with_peer(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a test with a connected peer, whose heartbeats are due when the test says so."""

    def run(test: Callable[[Bench], Awaitable[None]], *, is_connected: bool = True) -> None:
        async def whole() -> None:
            due = asyncio.Semaphore(0)
            stand_in.due = due  # type: ignore[attr-defined]
            real = asyncio.sleep

            async def sleep(delay_s: float) -> None:
                task = asyncio.current_task()
                if task is not None and task.get_name().startswith("heartbeat:"):
                    assert delay_s == 0.0
                    await due.acquire()
                else:
                    await real(delay_s)

            monkeypatch.setattr(peer_module.asyncio, "sleep", sleep)
            async with asyncio.timeout(300.0):
                bench = Bench(stand_in)
                if is_connected:
                    await bench.connect()
                try:
                    await test(bench)
                finally:
                    await bench.peer.close()

        asyncio.run(whole())

    return run


# ------------------------------------------------------------ connecting


def test_a_peer_says_hello_with_its_token_every_second_until_it_is_welcome(
    stand_in: StandIn, with_peer: Callable[..., None]
) -> None:
    async def test(bench: Bench) -> None:
        welcome = Welcome(run_id="r", incarnation="secret")

        def comes() -> None:
            if len(stand_in.waits) == 3:
                bench.comes(welcome)
            stand_in.on_ready(zmq.POLLIN)

        stand_in.on_wait = comes
        assert await bench.peer.connect(10.0) == welcome
        said = bench.sent()
        assert len(said) == 3
        assert all(isinstance(one, Hello) for one in said)
        assert said[0].token == token_for(run_keys(), "controller", "rollout", "rollout-0")  # type: ignore[attr-defined]
        assert stand_in.waits == [1.0] * 3
        assert {registration for registration, _ in bench.prefixes} == {b""}
        assert (stand_in.options[zmq.RECONNECT_IVL], stand_in.options[zmq.RECONNECT_IVL_MAX]) == (50, 2000)
        assert stand_in.is_attached
        assert bench.peer.counters["received"] == 1

    with_peer(test, is_connected=False)


def test_a_hub_that_does_not_answer_is_waited_for_until_the_deadline(
    stand_in: StandIn, with_peer: Callable[..., None]
) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(DeadlineExceeded, match=r"waited 2\.5 s for a reply to the connection request"):
            await bench.peer.connect(2.5)
        assert stand_in.waits == [1.0, 1.0, 0.5]
        assert stand_in.is_closed
        assert stand_in.is_terminated
        assert not [one for one in bench.sent() if isinstance(one, Goodbye)], "it was never welcome"

    with_peer(test, is_connected=False)


def test_a_refused_peer_says_why_at_once(stand_in: StandIn, with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.comes(Refused(reason="no token"))
        stand_in.on_wait = lambda: stand_in.on_ready(zmq.POLLIN)
        with pytest.raises(ChannelError, match="refused the connection: no token"):
            await bench.peer.connect(9.0)
        assert len(stand_in.waits) == 1
        assert stand_in.is_closed

    with_peer(test, is_connected=False)


def test_an_address_that_cannot_be_connected_to_leaves_nothing_open(
    stand_in: StandIn, with_peer: Callable[..., None]
) -> None:
    async def test(bench: Bench) -> None:
        stand_in.bind_error = zmq.ZMQError(errno.EINVAL)
        with pytest.raises(UserError, match="cannot connect: Invalid argument"):
            await bench.peer.connect(9.0)
        assert stand_in.is_terminated
        assert not stand_in.is_attached

    with_peer(test, is_connected=False)


def test_a_peer_that_closes_says_goodbye_once_and_is_closed(stand_in: StandIn, with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        before = stand_in.num_signals
        await bench.peer.close("done")
        assert bench.sent() == [Goodbye(reason="done")]
        assert stand_in.num_signals > before, "a task that waits for a message is woken"
        assert (stand_in.is_closed, stand_in.is_terminated) == (True, True)
        with pytest.raises(ChannelError, match="the channel is closed"):
            await bench.peer.receive(1.0)
        with pytest.raises(ChannelError, match="the channel is closed"):
            await bench.peer.send(returned())
        stand_in.is_closed = stand_in.is_terminated = False
        await bench.peer.close("again")
        assert bench.sent() == []
        assert (stand_in.is_closed, stand_in.is_terminated) == (False, False)

    with_peer(test)


# ------------------------------------------------------------ receiving


def test_messages_come_in_order_and_an_empty_inbox_is_waited_for(
    stand_in: StandIn, with_peer: Callable[..., None]
) -> None:
    async def test(bench: Bench) -> None:
        messages = [SampleAck(lease_ids=(number,)) for number in range(3)]
        bench.comes(*messages)
        assert [await bench.peer.receive(0.0) for _ in range(4)] == [*messages, None]
        assert stand_in.waits == []
        assert await bench.peer.receive(3.5 * LISTEN_S) is None
        assert sum(stand_in.waits) == pytest.approx(3.5 * LISTEN_S)
        assert max(stand_in.waits) <= LISTEN_S

    with_peer(test)


def test_what_is_no_message_of_this_channel_is_counted_and_passed_over(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        before = bench.peer.counters["received"]
        bench.comes(returned(), ACK)
        assert await bench.peer.receive(0.0) == ACK
        assert bench.peer.counters["rejected_malformed"] == 1
        assert bench.peer.counters["received"] == before + 1

    with_peer(test)


def test_a_welcome_is_passed_up_where_the_hub_knows_nothing_of_us_any_more(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        again = Welcome(run_id="r", incarnation="other")
        bench.comes(Welcome(run_id="r", incarnation="secret"), again)
        assert await bench.peer.receive(0.0) == again
        assert await bench.peer.receive(0.0) is None
        await bench.peer.send(returned())
        bench.sent()
        assert bench.prefixes[0][0] == b"other", "the newest registration goes with every message"

    with_peer(test)


def test_a_hub_that_does_not_know_us_hears_hello(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.comes(Heartbeat(state="stranger"), Heartbeat(state="known"))
        assert await bench.peer.receive(0.0) is None
        assert [type(one) for one in bench.sent()] == [Hello]

    with_peer(test)


def test_a_refusal_ends_the_channel(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.comes(ACK, Refused(reason="replaced"))
        assert await bench.peer.receive(0.0) == ACK
        with pytest.raises(ChannelError, match="replaced"):
            await bench.peer.receive(9.0)
        with pytest.raises(ChannelError, match="replaced"):
            await bench.peer.send(returned())
        await bench.peer.close()
        assert bench.sent() == [], "no Goodbye to a hub that refused us"

    with_peer(test)


def test_the_loop_gets_a_turn_after_every_burst_and_not_before(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def take(number: int) -> int:
            before = turns
            for _ in range(number):
                assert await bench.peer.receive(0.0) is not None
            return turns - before

        counting = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        for _ in range(3 * BURST):
            bench.comes(ACK)
        assert [await take(BURST), await take(1), await take(BURST - 1), await take(1)] == [0, 1, 0, 1]
        counting.cancel()

    with_peer(test)


def test_the_inbox_is_bounded_and_a_full_one_is_no_silence_of_the_hub(
    stand_in: StandIn, with_peer: Callable[..., None]
) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(QUEUE_MESSAGES + 1):
            bench.comes(ACK)
        stand_in.on_ready(zmq.POLLIN)
        assert len(stand_in.inbox) == 1, "the rest waits at the hub"
        stand_in.clock.now_s += 0.5
        assert bench.peer.hub_silence_s == 0.0
        assert await bench.peer.receive(0.0) == ACK
        assert bench.peer.hub_silence_s == 0.0, "there is room, and the last one is read"
        assert len(stand_in.inbox) == 0

    with_peer(test)


def test_silence_of_the_hub_ends_with_any_message(stand_in: StandIn, with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        stand_in.clock.now_s += 0.5
        assert bench.peer.hub_silence_s == pytest.approx(0.5)
        stand_in.clock.now_s += 0.25
        assert bench.peer.hub_silence_s == pytest.approx(0.75)
        bench.comes(Heartbeat(state="known"))
        assert bench.peer.hub_silence_s == 0.0

    with_peer(test)


def test_a_hub_that_never_spoke_is_silent_from_the_start(stand_in: StandIn) -> None:
    async def test() -> None:
        peer = Bench(stand_in).peer
        stand_in.clock.now_s += 0.5
        assert peer.hub_silence_s == 0.5

    asyncio.run(test())


def test_messages_and_room_wake_who_waits_for_them(stand_in: StandIn, with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        for events, messages, num_signals in (
            (zmq.POLLOUT, [], 1), (zmq.POLLIN, [], 0), (zmq.POLLIN, [ACK], 1),
            (zmq.POLLIN, [Heartbeat(state="known")], 1), (zmq.POLLIN, [Refused(reason="no")], 1),
        ):  # fmt: skip
            before = stand_in.num_signals
            bench.comes(*messages)  # type: ignore[misc]
            stand_in.on_ready(events)
            assert stand_in.num_signals - before == num_signals, (events, messages)

    with_peer(test)


# ------------------------------------------------------------ sending


def test_every_message_carries_the_registration_and_the_bytes_sent_with_it(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        await bench.peer.send(returned(3))
        await bench.peer.send(returned(30))
        assert [type(one) for one in bench.sent()] == [SampleReturned] * 2
        (first, second) = bench.prefixes
        assert (first[0], second[0]) == (b"secret", b"secret")
        assert first[1] - second[1] == -size(returned(30))
        assert bench.peer.counters["sent"] == 2

    with_peer(test)


@pytest.mark.parametrize(("queue", "waits_s"), [("full", 0.5), ("free", 0.0)])
def test_a_full_queue_is_waited_for_until_the_deadline(
    stand_in: StandIn, with_peer: Callable[..., None], queue: str, waits_s: float
) -> None:
    async def test(bench: Bench) -> None:
        if queue == "full":
            stand_in.send_error = zmq.Again()
            with pytest.raises(DeadlineExceeded, match=r"waited 0\.5 s for room to send SampleReturned"):
                await bench.peer.send(returned(), timeout_s=0.5)
            assert bench.peer.counters["sent"] == 0
        else:
            await bench.peer.send(returned(), timeout_s=0.0)
        assert sum(stand_in.waits) == pytest.approx(waits_s)
        assert all(0 < wait_s <= LISTEN_S for wait_s in stand_in.waits)
        stand_in.send_error = None

    with_peer(test)


async def fill(bench: Bench, num_bytes: int) -> int:
    """Send so many bytes in one message that may always go; returns the position behind it."""
    message = returned(0)
    length = 0
    while size(message) < num_bytes:
        length += max(1, (num_bytes - size(message)) // 13)
        message = returned(length)
    bench.known(await position(bench))
    await bench.peer.send(message, timeout_s=0.0)
    return await position(bench)


async def position(bench: Bench) -> int:
    """Bytes sent so far, as the hub is notified with the next message."""
    bench.sent()
    bench.comes(Heartbeat(state="stranger"))
    bench.socket.on_ready(zmq.POLLIN)
    bench.sent()
    return bench.prefixes[0][1]


@pytest.mark.parametrize(
    ("unread", "is_large", "goes"),
    [
        (WINDOW_BYTES // 4, True, True),
        (WINDOW_BYTES // 4 + 1, True, False),
        (WINDOW_BYTES - size(returned()), False, True),
        (WINDOW_BYTES - size(returned()) + 1, False, False),
        (0, True, True),
    ],
)
def test_a_message_waits_while_the_hub_has_too_much_unread(
    with_peer: Callable[..., None], unread: int, is_large: bool, goes: bool
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert "sent and the hub has not read | 1 MiB, or one larger message |" in page
    assert WINDOW_BYTES == 1 << 20
    large = returned(2 * WINDOW_BYTES // 12)
    assert size(large) > WINDOW_BYTES

    async def test(bench: Bench) -> None:
        now = await fill(bench, WINDOW_BYTES + 1)
        bench.known(now - unread)
        sending = bench.peer.send(large if is_large else returned(), timeout_s=0.0)
        if goes:
            await sending
        else:
            with pytest.raises(DeadlineExceeded):
                await sending
            bench.known(now - unread + 1)
            await bench.peer.send(large if is_large else returned(), timeout_s=0.0)

    with_peer(test)


def test_what_the_hub_has_read_never_becomes_less(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        now = await fill(bench, WINDOW_BYTES + 1)
        bench.known(now)
        bench.known(0)
        bench.comes(Heartbeat(state="known"))
        bench.socket.on_ready(zmq.POLLIN)
        await bench.peer.send(returned(2 * WINDOW_BYTES // 12), timeout_s=0.0)

    with_peer(test)


# ------------------------------------------------------------ heartbeats


def test_heartbeats_are_sent_until_eight_are_unanswered_and_then_a_hello_every_eighth_turn(
    with_peer: Callable[..., None],
) -> None:
    async def test(bench: Bench) -> None:
        await bench.beat(8)
        assert [type(one) for one in bench.sent()] == [Heartbeat] * 8
        await bench.beat(7)
        assert bench.sent() == []
        await bench.beat(9)
        assert [type(one) for one in bench.sent()] == [Hello, Hello]
        bench.comes(Heartbeat(state="known"))
        await bench.beat(8)
        assert [type(one) for one in bench.sent()] == [Heartbeat] * 8
        assert bench.num_asked == 16

    with_peer(test)


def test_a_peer_that_does_not_read_goes_on_beating(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(QUEUE_MESSAGES + 1):
            bench.comes(ACK)
        await bench.beat(2 * Peer.UNANSWERED_BEATS)
        assert [type(one) for one in bench.sent()] == [Heartbeat] * 2 * Peer.UNANSWERED_BEATS

    with_peer(test)


def test_a_status_that_raises_ends_the_channel_with_its_error(with_peer: Callable[..., None]) -> None:
    async def test(bench: Bench) -> None:
        bench.status_error = RuntimeError("no status")
        before = bench.socket.num_signals
        await bench.beat()
        assert bench.socket.num_signals == before + 1, "a task that waits for a message is woken"
        with pytest.raises(RuntimeError, match="no status"):
            await bench.peer.receive(0.0)

    with_peer(test)
