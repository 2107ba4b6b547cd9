"""Claims about Hub and Peer, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import numpy as np
import pytest
from channel_harness import (
    WAIT_S,
    RawPeer,
    expect,
    hello,
    met,
    open_hub,
    open_peer,
    returned,
    run,
    serve_until,
)

from areal_like.errors import ChannelError, DeadlineExceeded, UserError
from areal_like.transport.channel import QUEUE_MESSAGES
from areal_like.transport.sockets import ListeningClock, Signal
from areal_like.wire.encoding import LARGE_BYTES, encode
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, SampleAck, SampleReturned, Welcome


def test_messages_go_both_ways_and_goodbye_is_passed_up() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            assert (await met(hub, peer)).capacity == 4
            await peer.send(returned(5))
            message = await expect(hub, SampleReturned)
            assert isinstance(message, SampleReturned)
            assert message.segment.tokens_R.tolist() == [0, 1, 2, 3, 4]
            assert hub.send("rollout-0", SampleAck(lease_ids=(1,)))
            assert await peer.receive(WAIT_S) == SampleAck(lease_ids=(1,))
            assert await peer.receive(0.01) is None
            assert await hub.receive(0.01) is None
            await peer.close("done")
            assert await expect(hub, Goodbye) == Goodbye(reason="done")
            assert not hub.peers

    run(test())


def test_large_array_arrives_aligned_read_only_and_whole() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            await peer.send(returned(4 * LARGE_BYTES))
            message = await expect(hub, SampleReturned)
            assert isinstance(message, SampleReturned)
            tokens = message.segment.tokens_R
            assert tokens.flags.aligned
            assert not tokens.flags.writeable
            assert not tokens.flags.owndata
            assert np.array_equal(tokens, np.arange(4 * LARGE_BYTES))

    run(test())


def test_heartbeats_are_kept_and_answered() -> None:
    async def test() -> None:
        counters = iter(range(10**6))
        status = lambda: Heartbeat(state="generate", counters={"tokens": float(next(counters))})  # noqa: E731
        async with open_hub() as (hub, address), open_peer(address, status=status) as peer:
            await met(hub, peer)

            def beaten() -> bool:
                beat = hub.peers["rollout-0"].heartbeat
                return beat is not None and beat.counters["tokens"] >= 3 and peer.counters["received"] >= 4

            assert await serve_until(hub, beaten) == []
            assert peer.hub_silence_s < 1.0
            assert hub.silent(1.0) == []

    run(test())


def test_wrong_run_or_protocol_is_refused() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            for greeting, reason in ((hello(run_id="other"), "run"), (hello(protocol=99), "protocol")):
                async with open_peer(address, greeting) as peer:
                    connecting = asyncio.create_task(peer.connect(WAIT_S))
                    assert await serve_until(hub, connecting.done) == []
                    with pytest.raises(ChannelError, match=reason):
                        await connecting
            assert hub.counters["rejected_hello"] >= 2
            assert not hub.peers

    run(test())


def test_new_incarnation_replaces_the_old_and_the_old_is_refused() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as old:
            await met(hub, old)
            async with open_peer(address, hello(incarnation="b")) as new:
                connecting = asyncio.create_task(new.connect(WAIT_S))
                passed_up = await serve_until(hub, connecting.done)
                assert [message.incarnation for _, message in passed_up if isinstance(message, Hello)] == ["b"]
                receiving = asyncio.create_task(old.receive(WAIT_S))
                assert await serve_until(hub, receiving.done) == []
                with pytest.raises(ChannelError, match="replaced"):
                    await receiving
                assert hub.peers["rollout-0"].incarnation == "b"
                assert hub.send("rollout-0", SampleAck(lease_ids=(9,)))
                assert await new.receive(WAIT_S) == SampleAck(lease_ids=(9,))

    run(test())


def test_peer_of_a_restarted_hub_registers_again_and_is_reported() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            await hub.close()
            async with open_hub(address) as (reborn, _):
                receiving = asyncio.create_task(peer.receive(WAIT_S))
                passed_up = await serve_until(reborn, receiving.done)
                assert isinstance(await receiving, Welcome)
                assert [type(message) for _, message in passed_up] == [Hello]
                await peer.send(returned())
                await expect(reborn, SampleReturned)

    run(test())


def test_forgotten_peer_says_hello_again_and_is_reported() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            hub.forget("rollout-0")
            receiving = asyncio.create_task(peer.receive(WAIT_S))
            passed_up = await serve_until(hub, receiving.done)
            assert [type(message) for _, message in passed_up] == [Hello]
            assert isinstance(await receiving, Welcome)

    run(test())


def test_send_to_unknown_or_vanished_peer_is_false_and_counted() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            assert not hub.send("nobody", SampleAck(lease_ids=()))
            assert hub.counters["unroutable"] == 1
            raw = RawPeer(address)
            raw.say_hello()
            await expect(hub, Hello)
            raw.close()  # like kill -9: no Goodbye
            deadline_s = time.monotonic() + WAIT_S
            while hub.send("rollout-0", SampleAck(lease_ids=())):
                assert time.monotonic() < deadline_s
                await hub.receive(0.01)
            assert hub.counters["unroutable"] == 2

    run(test())


def test_queue_to_a_peer_that_does_not_read_is_bounded() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            raw = RawPeer(address, receive_queue=10)
            raw.say_hello()
            await expect(hub, Hello)
            big = SampleAck(lease_ids=tuple(range(50_000)))
            num_queued = 0
            while hub.send("rollout-0", big):
                num_queued += 1
                assert num_queued < 3 * QUEUE_MESSAGES
            assert hub.counters["queue_full"] == 1
            raw.close()

    run(test())


def test_peer_without_room_to_send_meets_its_deadline() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            await hub.close()

            async def fill() -> None:
                for _ in range(3 * QUEUE_MESSAGES):
                    await peer.send(returned(), timeout_s=0.05)

            with pytest.raises(DeadlineExceeded, match="SampleReturned"):
                await fill()

    run(test())


def test_connect_without_a_hub_meets_its_deadline() -> None:
    async def test() -> None:
        async with open_peer("tcp://127.0.0.1:9") as peer:
            with pytest.raises(DeadlineExceeded, match="a reply to the connection request"):
                await peer.connect(0.1)

    run(test())


def test_silent_peer_is_named_and_a_talking_one_is_not() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            raw = RawPeer(address)
            raw.say_hello("rollout-1")
            await expect(hub, Hello)
            await serve_until(hub, lambda: bool(hub.silent(0.3)))
            assert hub.silent(0.3) == ["rollout-1"]
            raw.close()

    run(test())


def test_nobody_is_silent_for_time_in_which_the_hub_did_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("areal_like.transport.sockets.time.monotonic", lambda: now_s)
    clock = ListeningClock()
    start_s = clock.tick()
    now_s += 3600.0
    assert clock.tick() - start_s == ListeningClock.MAX_GAP_S


def test_a_hub_that_only_receives_counts_the_time_in_which_it_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for the silent ones meanwhile; three seconds of listening are three seconds of silence."""

    async def test() -> None:
        async with open_hub() as (hub, address):
            raw = RawPeer(address)
            raw.say_hello("rollout-1")
            await expect(hub, Hello)
            now_s = time.monotonic()
            monkeypatch.setattr("areal_like.transport.sockets.time.monotonic", lambda: now_s)
            assert await hub.receive(0.0) is None
            for _ in range(4):
                now_s += ListeningClock.MAX_GAP_S
                assert await hub.receive(0.0) is None
            assert hub.silent(2.5) == ["rollout-1"]
            monkeypatch.undo()
            raw.close()

    run(test())


def test_peer_notices_a_hub_that_stopped_listening() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            while peer.hub_silence_s < 0.2:  # nobody calls hub.receive
                assert await peer.receive(0.02) is None
            await serve_until(hub, lambda: peer.hub_silence_s < 0.1)

    run(test())


def test_heartbeats_flow_while_the_owner_waits_for_something_else() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            busy = asyncio.create_task(asyncio.to_thread(time.sleep, 0.3))
            await serve_until(hub, busy.done)
            assert hub.counters["received"] > 4

    run(test())


def test_status_that_raises_ends_the_peer_loudly() -> None:
    async def test() -> None:
        def status() -> Heartbeat:
            raise RuntimeError("no status")

        async with open_hub() as (hub, address), open_peer(address, status=status) as peer:
            await met(hub, peer)
            with pytest.raises(RuntimeError, match="no status"):
                await peer.receive(WAIT_S)

    run(test())


def test_garbage_is_counted_and_logged_sparingly_and_the_hub_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        dice = random.Random(0)
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            raw = RawPeer(address)
            honest = encode(returned(20))
            for number in range(400):
                frames = [bytearray(frame) for frame in honest]
                if number % 4 == 0:
                    frames = [bytearray(dice.randbytes(dice.randrange(60))) for _ in range(dice.randrange(1, 5))]
                elif number % 4 == 1:
                    target = frames[dice.randrange(2)]
                    target[dice.randrange(len(target))] ^= 1 << dice.randrange(8)
                elif number % 4 == 2:
                    del frames[0][dice.randrange(1, len(frames[0])) :]
                raw.send_frames(frames)

            def refused() -> int:
                return sum(count for kind, count in hub.counters.items() if kind.startswith("rejected_"))

            assert await serve_until(hub, lambda: refused() == 400) == []
            assert hub.counters["rejected_malformed"] >= 150
            assert hub.counters["rejected_unknown_peer"] >= 100
            await peer.send(returned())
            await expect(hub, SampleReturned)
            raw.close()

    with caplog.at_level(logging.WARNING):
        run(test())
    assert 1 <= len(caplog.records) <= 4


def test_message_of_a_kind_the_hub_does_not_take_is_refused_from_a_registered_peer_too() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            await peer.send(SampleAck(lease_ids=(1,)))
            await serve_until(hub, lambda: hub.counters["rejected_malformed"] == 1)
            assert "rollout-0" in hub.peers

    run(test())


def test_one_connection_carries_one_name_the_newest() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            raw = RawPeer(address)
            for name in ("rollout-1", "rollout-2"):
                raw.say_hello(name)
                await serve_until(hub, lambda name=name: name in hub.peers)
            assert set(hub.peers) == {"rollout-2"}
            assert not hub.send("rollout-1", SampleAck(lease_ids=(1,))), "it must not reach the other name"
            assert hub.send("rollout-2", SampleAck(lease_ids=(1,)))
            raw.close()

    run(test())


def test_wait_for_a_signal_lasts_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that ends at once would be a loop that takes a whole core."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        asked: list[float] = []
        call_later = loop.call_later

        def at_once(delay: float, *arguments: Any) -> asyncio.TimerHandle:
            asked.append(delay)
            return call_later(0.0, *arguments)

        monkeypatch.setattr(loop, "call_later", at_once)
        signal = Signal()
        assert not await signal.wait(30.0)
        assert not await signal.wait(-1.0)
        assert asked == [30.0, 0.0]
        waiting = asyncio.ensure_future(signal.wait(30.0))
        await asyncio.sleep(0)
        signal.set()
        assert await waiting
        monkeypatch.undo()

    asyncio.run(test())


def test_flood_does_not_starve_the_loop() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            for number in range(QUEUE_MESSAGES):
                await peer.send(returned(lease_id=number))
            turns = 0

            async def other_task() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            other = asyncio.create_task(other_task())
            leases = []
            while len(leases) < QUEUE_MESSAGES:
                message = await expect(hub, SampleReturned)
                assert isinstance(message, SampleReturned)
                leases.append(message.lease_id)
            other.cancel()
            assert leases == list(range(QUEUE_MESSAGES))
            assert turns >= QUEUE_MESSAGES // 64

    run(test())


def test_port_in_use_is_the_users_mistake() -> None:
    async def test() -> None:
        async with open_hub() as (_, address):
            with pytest.raises(UserError, match="in use"):
                async with open_hub(address):
                    pass

    run(test())


@pytest.mark.parametrize("bind", ["ipc:///tmp/x", "127.0.0.1:0", "nonsense"])
def test_hub_binds_nothing_but_a_tcp_address(bind: str) -> None:
    async def test() -> None:
        async with open_hub(bind):
            pass

    with pytest.raises(UserError):
        run(test())
