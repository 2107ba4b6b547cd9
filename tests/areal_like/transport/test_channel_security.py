"""Who may do what at a hub: keys, tokens, names, and what a peer may hold. Over real sockets on loopback."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import zmq
from channel_harness import (
    WAIT_S,
    expect,
    hello,
    met,
    open_hub,
    open_peer,
    raw_peer,
    returned,
    run,
    serve_until,
)
from made_keys import keys_of, run_keys

from areal_like.errors import ChannelError, DeadlineExceeded, UserError
from areal_like.transport.credentials import JoinSecret, load_join_secret, make_run_credentials, token_for
from areal_like.transport.sockets import MAX_TRANSPORT_FRAME_BYTES, WINDOW_BYTES
from areal_like.wire.encoding import LARGE_BYTES, MAX_FRAME_BYTES
from areal_like.wire.messages import Goodbye, Heartbeat, Hello, SampleAck, SampleReturned


def token(name: str, role: str = "rollout") -> str:
    return token_for(run_keys(), "controller", role, name)


def test_sockets_use_keepalive_and_never_the_transports_own_heartbeat() -> None:
    """libzmq 4.3.5 aborts the process when a connection with a full queue breaks before its next heartbeat."""

    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            for end in (hub, peer):
                raw = end._socket.raw  # type: ignore[union-attr]
                assert raw.getsockopt(zmq.HEARTBEAT_IVL) == 0
                assert raw.getsockopt(zmq.TCP_KEEPALIVE) == 1
                assert raw.getsockopt(zmq.TCP_KEEPALIVE_IDLE) + 3 * raw.getsockopt(zmq.TCP_KEEPALIVE_INTVL) <= 60
                assert raw.getsockopt(zmq.MAXMSGSIZE) == MAX_TRANSPORT_FRAME_BYTES

    run(test())


def test_hub_admits_the_runs_key_and_refuses_others(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "ours")
    make_run_credentials(tmp_path / "theirs")
    for file in ("server.public", "server.secret"):  # a stranger who knows the server's address and public key
        (tmp_path / "theirs" / file).write_bytes((tmp_path / "ours" / file).read_bytes())

    async def test() -> None:
        async with open_hub("tcp://0.0.0.0:0", tmp_path / "ours") as (hub, bound):
            address = bound.replace("0.0.0.0", "127.0.0.1")
            async with open_peer(address, hello("stranger"), curve_dir=tmp_path / "theirs") as stranger:
                connecting = asyncio.create_task(stranger.connect(0.5))
                assert await serve_until(hub, connecting.done) == []
                with pytest.raises(DeadlineExceeded):
                    await connecting
            assert hub.counters["rejected_key"] >= 1
            async with open_peer(address, curve_dir=tmp_path / "ours") as peer:
                await met(hub, peer)
                await peer.send(returned(2 * LARGE_BYTES))
                await expect(hub, SampleReturned)

    run(test())


def test_peer_without_keys_gets_no_answer_from_a_loopback_hub() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            plain = zmq.Context.instance().socket(zmq.DEALER)
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(address)
            plain.send_multipart([b"", b"x"])
            async with open_peer(address) as peer:
                await met(hub, peer)
            assert not plain.poll(0)
            assert hub.counters["rejected_malformed"] == hub.counters["rejected_unknown_peer"] == 0
            plain.close(0)

    run(test())


def test_peer_does_not_talk_to_a_hub_with_another_key(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "theirs")

    async def test() -> None:
        async with open_hub(curve_dir=tmp_path / "theirs") as (hub, address), open_peer(address) as peer:
            connecting = asyncio.create_task(peer.connect(0.3))
            assert await serve_until(hub, connecting.done) == []
            with pytest.raises(DeadlineExceeded):
                await connecting

    run(test())


@pytest.mark.parametrize(
    "greeting",
    [
        hello(),
        hello(token="0" * 64),
        hello(token="not hexadecimal \u00e9"),
        hello(token=token("rollout-1")),
        hello(token=token("rollout-0", role="trainer")),
        hello(token=JoinSecret(b"another secret").token("rollout", "rollout-0")),
        hello(token=load_join_secret(run_keys(), "services").token("rollout", "rollout-0")),
    ],
    ids=["none", "wrong", "odd", "another name", "another role", "another run", "another audience"],
)
def test_key_without_the_token_of_role_and_name_is_refused_and_gets_nothing(
    greeting: Hello, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            with raw_peer(address) as stranger:
                for _ in range(50):
                    stranger.send(greeting)
                stranger.send(returned())
                stranger.send(Heartbeat(state="generate"))
                passed_up = await serve_until(hub, lambda: hub.counters["rejected_unknown_peer"] == 2)
                assert passed_up == []
                assert hub.counters["rejected_hello"] == 50
                assert not hub.peers
                assert not hub.send("rollout-0", SampleAck(lease_ids=(1,)))

    with caplog.at_level(logging.WARNING):
        run(test())
    assert 1 <= len(caplog.records) <= 2, "complaints are rate-limited"
    assert greeting.token not in caplog.text or not greeting.token


def test_live_name_is_not_taken_over_without_its_token() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as owner:
            await met(hub, owner)
            with raw_peer(address) as thief:
                thief.send(hello(incarnation="b"))
                thief.send(hello(incarnation="a", token=token("rollout-1")))
                thief.send(returned(), registration="f" * 32)
                assert await serve_until(hub, lambda: hub.counters["rejected_unknown_peer"] == 1) == []
                assert hub.counters["rejected_hello"] == 2
                assert hub.send("rollout-0", SampleAck(lease_ids=(7,)))
                assert await owner.receive(WAIT_S) == SampleAck(lease_ids=(7,))
                await owner.send(returned())
                await expect(hub, SampleReturned)

    run(test())


def test_process_started_by_the_controller_joins_with_what_it_was_given() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            given = keys_of("rollout", "rollout-0")
            async with open_peer(address, curve_dir=given) as peer:
                passed_up = await met(hub, peer)
                assert passed_up.token == "", "it is of no use to the owner"
            await expect(hub, Goodbye)
            async with open_peer(address, hello("rollout-1"), curve_dir=given) as other:
                connecting = asyncio.create_task(other.connect(WAIT_S))
                assert await serve_until(hub, connecting.done) == []
                with pytest.raises(ChannelError, match="no token for rollout rollout-1"):
                    await connecting

    run(test())


def test_one_connection_carries_one_name_the_newest() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            with raw_peer(address) as raw:
                raw.say_hello("rollout-0")
                await expect(hub, Hello)
                raw.say_hello("rollout-1")
                raw.send(returned())
                passed_up = [await hub.receive(WAIT_S) for _ in range(3)]
                assert [(name, type(message)) for name, message in filter(None, passed_up)] == [
                    ("rollout-0", Goodbye), ("rollout-1", Hello), ("rollout-1", SampleReturned),
                ]  # fmt: skip
                assert list(hub.peers) == ["rollout-1"]
                assert not hub.send("rollout-0", SampleAck(lease_ids=(1,)))
                raw.send(hello("rollout-0"))  # back without a token: the present name stays
                assert await serve_until(hub, lambda: hub.counters["rejected_hello"] == 1) == []
                assert list(hub.peers) == ["rollout-1"]

    run(test())


def test_reconnected_peer_goes_on_with_its_registration_and_loses_nothing_it_sends() -> None:
    """What a peer sends on a new connection counts from its first message on: it shows its registration's secret."""

    async def test() -> None:
        async with open_hub() as (hub, address):
            with raw_peer(address) as first, raw_peer(address) as second:
                first.say_hello()
                await expect(hub, Hello)
                registration = hub.peers["rollout-0"].registration
                first.close()
                second.send(returned(), registration)
                await expect(hub, SampleReturned)
                assert hub.send("rollout-0", SampleAck(lease_ids=(1,)))
                assert second.socket.poll(int(WAIT_S * 1000))
                hub.forget("rollout-0")
                second.send(returned(), registration)
                assert await serve_until(hub, lambda: hub.counters["rejected_unknown_peer"] == 1) == []

    run(test())


def test_frame_over_the_limit_ends_its_connection_before_it_is_held() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            with raw_peer(address) as raw:
                raw.send_frames([b"x" * (2 * MAX_TRANSPORT_FRAME_BYTES)])
                await peer.send(returned())
                await expect(hub, SampleReturned)
                assert hub.counters["rejected_malformed"] == 0, "it never came"

    run(test())


def test_message_larger_than_a_frame_arrives_whole() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            await peer.send(returned(3 * WINDOW_BYTES // 4))  # three windows, one array of 12 frames
            message = await expect(hub, SampleReturned)
            assert isinstance(message, SampleReturned)
            assert message.segment.tokens_R.nbytes > 4 * MAX_FRAME_BYTES
            assert message.segment.tokens_R[-1] == len(message.segment.tokens_R) - 1

    run(test())


def test_hub_that_does_not_read_holds_no_more_than_a_window_of_each_peer() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            sent = 0

            async def fill() -> None:  # the hub does not read
                nonlocal sent
                while True:
                    await peer.send(returned(10_000), timeout_s=0.2)
                    sent += 1

            with pytest.raises(DeadlineExceeded):
                await fill()
            assert peer._sent_bytes - peer._read_bytes <= WINDOW_BYTES + 10_000, "heartbeats may go on top"
            assert sent >= 5
            received = 0
            while received < sent:
                if (await hub.receive(WAIT_S)) is not None:
                    received += 1
            sending = asyncio.create_task(peer.send(returned(10_000), timeout_s=WAIT_S))  # there is room again
            await serve_until(hub, sending.done)
            await sending

    run(test())


def test_bytes_lost_on_the_way_do_not_use_up_the_window() -> None:
    async def test() -> None:
        async with open_hub() as (hub, address), open_peer(address) as peer:
            await met(hub, peer)
            peer._sent_bytes += 2 * WINDOW_BYTES  # as if they had been queued on a connection that broke
            sending = asyncio.create_task(peer.send(returned(), timeout_s=WAIT_S))
            passed_up = await serve_until(hub, sending.done)
            await sending
            if not passed_up:
                await expect(hub, SampleReturned)

    run(test())


@pytest.mark.parametrize("prefix_frame", [b"", b"short", b"\xff" * 40, b"x" * 100])
def test_odd_first_frames_are_refused(prefix_frame: bytes) -> None:
    async def test() -> None:
        async with open_hub() as (hub, address):
            with raw_peer(address) as raw:
                raw.socket.send_multipart([prefix_frame])
                raw.socket.send_multipart([prefix_frame, b"\xc1"])
                raw.socket.send_multipart([prefix_frame, b"\xc1\x91\xcf" + b"\xff" * 8, b"x"])
                assert await serve_until(hub, lambda: hub.counters["rejected_malformed"] == 3) == []

    run(test())


def test_keys_that_others_may_read_start_no_hub(tmp_path: Path) -> None:
    make_run_credentials(tmp_path / "keys")
    (tmp_path / "keys" / "controller.join").chmod(0o640)

    async def test() -> None:
        async with open_hub(curve_dir=tmp_path / "keys"):
            pass

    with pytest.raises(UserError, match="users can read this key"):
        run(test())


def secrets_in(value: Any) -> bool:
    return any(path.read_text().strip() in str(value) for path in run_keys().glob("*.*") if path.suffix != ".public")


def test_hello_shows_no_token() -> None:
    greeting = hello(token=token("rollout-0"))
    assert greeting.token not in repr(greeting)
    assert not secrets_in(greeting)
