"""What a worker asks of trainer and parents for a payload, whom it gives up and when; connections played by hand."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.errors import ChannelError, DeadlineExceeded, WeightError, WeightsDamaged
from areal_like.weights.delta import Base
from areal_like.weights.process_group import JoinRequest, NoGroup
from areal_like.weights.stream import (
    FROM_RELAY,
    FROM_TRAINER,
    WINDOW_CHUNKS,
    Chunk,
    ChunkRequest,
    Locator,
    NoChunk,
    ParentRequest,
    Payload,
    TransferPlan,
    TransferUnavailable,
    UpstreamPeer,
    WayRequest,
)
from areal_like.wire.messages import Message, Welcome
from rollout.weights import fetching
from rollout.weights.chunks import ChunkFile
from rollout.weights.fetching import Fetcher

TRAINER, OTHER, RELAY, SECOND = "tcp://trainer:1", "tcp://trainer:2", "tcp://relay:1", "tcp://relay:2"
LOCATOR = Locator(TRAINER, 3, "l0")
CHUNK_BYTES = 4
DATA = np.arange(CHUNK_BYTES * 20 - 1, dtype=np.uint8)
PARTS = [DATA[start : start + CHUNK_BYTES] for start in range(0, len(DATA), CHUNK_BYTES)]

Answers = Callable[[Message], list[Message]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


class Wire:
    """A connection that answers each message by a function; where there is no answer the time waited passes."""

    def __init__(self, net: Net, address: str, accept: frozenset[type]) -> None:
        self.net, self.address, self.accept = net, address, accept
        self.sent: list[tuple[Message, float]] = []
        self.inbox: list[Message] = []
        self.is_closed = False
        self.hub_silence_s = 0.0

    async def connect(self, timeout_s: float) -> Welcome:
        self.net.connects.append((self.address, timeout_s))
        if self.address in self.net.unreachable:
            raise DeadlineExceeded("a reply to the connection request", self.address, timeout_s)
        return Welcome(run_id="r", incarnation="i")

    async def send(self, message: Message, timeout_s: float = 30.0) -> None:
        assert not self.is_closed
        self.sent.append((message, timeout_s))
        self.inbox += self.net.answers[self.address](message)

    async def receive(self, timeout_s: float) -> Message | None:
        assert not self.is_closed
        if self.inbox:
            return self.inbox.pop(0)
        self.net.clock.now_s += timeout_s
        self.net.waits.append(timeout_s)
        self.hub_silence_s += self.net.silence
        return None

    async def close(self, reason: str = "") -> None:
        assert reason == "done"
        self.is_closed = True


class Net:
    """All connections of one fetcher."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: dict[str, Answers] = {}
        self.unreachable: set[str] = set()
        self.connects: list[tuple[str, float]] = []
        self.waits: list[float] = []
        self.wires: list[Wire] = []
        self.arrived: list[int] = []
        self.silence = 0.0
        self.fetcher = Fetcher(self.wire, "tcp://me:1", lambda file, index: self.arrived.append(index))

    def wire(self, address: str, accept: frozenset[type]) -> Wire:
        self.wires.append(Wire(self, address, accept))
        return self.wires[-1]

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for wire in self.wires for message, _ in wire.sent if isinstance(message, kind)]

    def parents(self, *addresses: str) -> None:
        """Whom the trainer names, one after the other; it serves chunks itself."""
        left = list(addresses)

        def answer(message: Message) -> list[Message]:
            if isinstance(message, ParentRequest):
                return [UpstreamPeer(payload=message.payload, address=left.pop(0))]
            return serve(message)

        self.answers[TRAINER] = answer


def serve(message: Message) -> list[Message]:
    assert isinstance(message, ChunkRequest)
    return [Chunk(payload=message.payload, index=message.index, data=PARTS[message.index])]


def serve_damaged(message: Message) -> list[Message]:
    assert isinstance(message, ChunkRequest)
    return [Chunk(payload=message.payload, index=message.index, data=PARTS[message.index] + 1)]


def nothing(message: Message) -> list[Message]:
    return []


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    clock = Clock()
    monkeypatch.setattr(fetching, "time", clock)
    return Net(clock)


@pytest.fixture
def file(tmp_path: Path) -> ChunkFile:
    crcs = np.array([zlib.crc32(part.tobytes()) for part in PARTS], np.uint32)
    return ChunkFile(tmp_path / "v3", Payload(
        name="v3", is_delta=False, num_bytes=len(DATA), chunk_bytes=CHUNK_BYTES, chunk_crcs=crcs, manifest=b"{}"
    ))  # fmt: skip


def run(test: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(300.0):
            return await test

    return asyncio.run(bounded())


def counts(net: Net) -> dict[str, float]:
    return {name: number for name, number in net.fetcher.counters.items() if number}


# ------------------------------------------------------------ the way to a version


@pytest.mark.parametrize(("base", "version", "digest"), [(None, -1, ""), (Base(2, "abc"), 2, "abc")])
def test_the_way_is_asked_for_with_what_is_here_and_only_its_own_answer_counts(
    net: Net, base: Base | None, version: int, digest: str
) -> None:
    def answer(message: Message) -> list[Message]:
        others = [(4, "l0"), (3, "l1")]
        return [
            *(TransferPlan(version=number, lineage=lineage, payloads=()) for number, lineage in others),
            *(TransferUnavailable(version=number, lineage=lineage, reason="gone") for number, lineage in others),
            TransferPlan(version=3, lineage="l0", payloads=(payload,)),
        ]

    payload = Payload(
        name="p", is_delta=False, num_bytes=1, chunk_bytes=1, chunk_crcs=np.zeros(1, np.uint32), manifest=b""
    )
    net.answers[TRAINER] = answer
    (found,) = run(net.fetcher.way(LOCATOR, base))
    assert found.name == "p"
    assert net.sent(Message) == [WayRequest(version=3, lineage="l0", base_version=version, base_digest=digest)]
    assert net.wires[0].accept == FROM_TRAINER
    assert net.connects == [(TRAINER, fetching.CONNECT_S)]


def test_a_version_that_is_not_available_is_said_to_be_with_the_reason(net: Net) -> None:
    net.answers[TRAINER] = lambda _: [TransferUnavailable(version=3, lineage="l0", reason="retired")]
    with pytest.raises(WeightsDamaged, match="version 3 is not available: retired"):
        run(net.fetcher.way(LOCATOR, None))


def test_the_call_to_a_group_is_the_answer_to_the_request_for_that_version(net: Net) -> None:
    net.answers[TRAINER] = lambda _: [
        NoGroup(version=4, lineage="l0", reason="a"), NoGroup(version=3, lineage="l1", reason="b"),
        NoGroup(version=3, lineage="l0", reason="c"),
    ]  # fmt: skip
    reply = run(net.fetcher.join(TRAINER, JoinRequest(version=3, lineage="l0")))
    assert reply == NoGroup(version=3, lineage="l0", reason="c")


def test_a_trainer_that_does_not_answer_is_asked_again_on_the_same_connection(net: Net) -> None:
    replies = [[], [], [TransferPlan(version=3, lineage="l0", payloads=())]]
    net.answers[TRAINER] = lambda _: replies.pop(0)
    started_s = net.clock.now_s
    assert run(net.fetcher.way(LOCATOR, None)) == ()
    assert len(net.wires) == 1
    assert net.clock.now_s - started_s == pytest.approx(2 * fetching.ASK_AGAIN_S)
    assert max(net.waits) <= fetching.POLL_S
    assert {timeout_s for _, timeout_s in net.wires[0].sent} == {fetching.ASK_AGAIN_S}


def test_a_trainer_that_refuses_the_connection_is_connected_to_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "POLL_S", 0.0)
    num_sent = 0

    def answer(message: Message) -> list[Message]:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 1:
            raise ChannelError("refused")
        return [TransferPlan(version=3, lineage="l0", payloads=())]

    net.answers[TRAINER] = answer
    run(net.fetcher.way(LOCATOR, None))
    first, second = net.wires
    assert first.is_closed
    assert not second.is_closed


def test_one_connection_to_the_trainer_is_kept_until_it_moves_or_the_fetcher_closes(net: Net) -> None:
    async def test() -> None:
        for address in (TRAINER, OTHER):
            net.answers[address] = lambda _: [TransferPlan(version=3, lineage="l0", payloads=())]
        await net.fetcher.way(LOCATOR, None)
        await net.fetcher.way(LOCATOR, None)
        assert [wire.address for wire in net.wires] == [TRAINER]
        await net.fetcher.way(Locator(OTHER, 3, "l0"), None)
        assert [(wire.address, wire.is_closed) for wire in net.wires] == [(TRAINER, True), (OTHER, False)]
        await net.fetcher.close()
        await net.fetcher.close()
        assert net.wires[1].is_closed

    run(test())


# ------------------------------------------------------------ a payload


def test_a_payload_comes_from_the_trainer_on_the_connection_that_is_there(net: Net, file: ChunkFile) -> None:
    net.parents(TRAINER)
    run(net.fetcher.fetch(LOCATOR, file))
    assert bytes(file.data) == DATA.tobytes()
    assert net.arrived == list(range(len(PARTS)))
    assert len(net.wires) == 1
    assert net.sent(ParentRequest) == [ParentRequest(payload="v3", address="tcp://me:1", lost="")]
    assert counts(net) == {"fetched_chunks": len(PARTS), "fetched_bytes": len(DATA)}


def test_a_payload_comes_from_another_worker_whose_connection_is_closed_afterwards(net: Net, file: ChunkFile) -> None:
    net.parents(RELAY)
    net.answers[RELAY] = serve
    run(net.fetcher.fetch(LOCATOR, file))
    trainer, relay = net.wires
    assert (relay.address, relay.accept, relay.is_closed) == (RELAY, FROM_RELAY, True)
    assert not trainer.is_closed
    assert net.connects[1] == (RELAY, fetching.CONNECT_S)
    assert {timeout_s for _, timeout_s in relay.sent} == {fetching.SILENT_S}


def test_no_more_chunks_are_asked_for_than_the_window_and_every_chunk_makes_room_for_one(
    net: Net, file: ChunkFile
) -> None:
    asked: list[int] = []

    def answer(message: Message) -> list[Message]:
        assert isinstance(message, ChunkRequest)
        asked.append(message.index)
        if len(asked) < WINDOW_CHUNKS:
            return []
        return serve(ChunkRequest(payload="v3", index=asked[len(asked) - WINDOW_CHUNKS]))

    net.parents(RELAY)
    net.answers[RELAY] = answer
    with pytest.raises(IndexError):  # the trainer names nobody else once the parent has stalled
        run(net.fetcher.fetch(LOCATOR, file))
    assert asked == list(range(len(PARTS)))
    assert len(file.missing()) == WINDOW_CHUNKS - 1


def test_only_chunks_that_were_asked_for_are_taken(net: Net, file: ChunkFile) -> None:
    def answer(message: Message) -> list[Message]:
        assert isinstance(message, ChunkRequest)
        unasked = Chunk(payload="v3", index=19, data=PARTS[19])
        foreign = Chunk(payload="v2", index=message.index, data=PARTS[message.index])
        elsewhere = NoChunk(payload="v2", index=message.index, reason="not of this payload")
        before = [unasked, foreign, elsewhere] if message.index == 0 else []
        return [*before, *serve(message)]

    net.parents(RELAY)
    net.answers[RELAY] = answer
    run(net.fetcher.fetch(LOCATOR, file))
    assert net.arrived == list(range(len(PARTS)))
    assert counts(net) == {"fetched_chunks": len(PARTS), "fetched_bytes": len(DATA)}


def test_a_damaged_chunk_is_asked_for_again_and_so_many_of_them_end_a_parent(net: Net, file: ChunkFile) -> None:
    bad = list(range(fetching.MAX_BAD - 1))

    def answer(message: Message) -> list[Message]:
        assert isinstance(message, ChunkRequest)
        if message.index in bad:
            bad.remove(message.index)
            return serve_damaged(message)
        return serve(message)

    net.parents(RELAY)
    net.answers[RELAY] = answer
    run(net.fetcher.fetch(LOCATOR, file))
    assert counts(net) == {
        "fetched_chunks": len(PARTS), "fetched_bytes": len(DATA), "damaged_chunks": fetching.MAX_BAD - 1
    }  # fmt: skip


def test_a_parent_that_fails_is_named_to_the_trainer_and_what_it_brought_stays(net: Net, file: ChunkFile) -> None:
    def ends(message: Message) -> list[Message]:
        assert isinstance(message, ChunkRequest)
        if message.index < 5:
            return serve(message)
        return [NoChunk(payload="v3", index=message.index, reason="the file is not on this worker")]

    net.parents(RELAY, SECOND)
    net.answers |= {RELAY: ends, SECOND: serve}
    run(net.fetcher.fetch(LOCATOR, file))
    assert [request.lost for request in net.sent(ParentRequest)] == ["", RELAY]
    assert [wire.is_closed for wire in net.wires] == [False, True, True]
    assert [message.index for message, _ in net.wires[2].sent if isinstance(message, ChunkRequest)] == list(
        range(5, 20)
    )
    assert counts(net) == {"fetched_chunks": len(PARTS), "fetched_bytes": len(DATA), "lost_parents": 1}


@pytest.mark.parametrize("kind", ["damaged", "silent", "stalled", "unreachable", "closed"])
def test_a_parent_that_brings_nothing_is_given_up(net: Net, file: ChunkFile, kind: str) -> None:
    def broken(message: Message) -> list[Message]:
        raise ChannelError("the channel is closed")

    net.parents(RELAY, TRAINER)
    net.answers[RELAY] = {"damaged": serve_damaged, "closed": broken}.get(kind, nothing)
    net.silence = fetching.POLL_S if kind == "silent" else 0.0
    net.unreachable = {RELAY} if kind == "unreachable" else set()
    started_s = net.clock.now_s
    run(net.fetcher.fetch(LOCATOR, file))
    assert file.is_complete
    assert counts(net)["lost_parents"] == 1
    assert net.wires[1].is_closed
    waited_s = {"silent": fetching.SILENT_S, "stalled": fetching.STALLED_S}.get(kind, 0.0)
    expected_s = waited_s + (fetching.POLL_S if waited_s else 0.0)
    assert net.clock.now_s - started_s == pytest.approx(expected_s)
    assert counts(net).get("damaged_chunks", 0) == (fetching.MAX_BAD if kind == "damaged" else 0)


def test_every_chunk_renews_the_patience_with_a_parent(net: Net, file: ChunkFile) -> None:
    def answer(message: Message) -> list[Message]:
        net.clock.now_s += fetching.STALLED_S - fetching.POLL_S
        return serve(message)

    net.parents(RELAY)
    net.answers[RELAY] = answer
    run(net.fetcher.fetch(LOCATOR, file))
    assert "lost_parents" not in counts(net)


def test_what_a_parent_forgot_is_asked_for_again_in_order(net: Net, file: ChunkFile) -> None:
    asked: list[int] = []

    def answer(message: Message) -> list[Message]:
        assert isinstance(message, ChunkRequest)
        asked.append(message.index)
        if len(asked) < WINDOW_CHUNKS:
            return []
        return [Welcome(run_id="r", incarnation="j")] if len(asked) == WINDOW_CHUNKS else serve(message)

    net.parents(RELAY)
    net.answers[RELAY] = answer
    run(net.fetcher.fetch(LOCATOR, file))
    assert asked == [*range(WINDOW_CHUNKS), *range(len(PARTS))]


def test_a_payload_that_nobody_has_any_more_is_said_to_be(net: Net, file: ChunkFile) -> None:
    net.parents("")
    with pytest.raises(WeightsDamaged, match="v3 is no longer available"):
        run(net.fetcher.fetch(LOCATOR, file))


def test_the_parent_of_another_payload_is_not_asked(net: Net, file: ChunkFile) -> None:
    net.answers[TRAINER] = lambda message: (
        [UpstreamPeer(payload="v2", address=SECOND), UpstreamPeer(payload="v3", address=RELAY)]
        if isinstance(message, ParentRequest)
        else []
    )
    net.answers[RELAY] = serve
    run(net.fetcher.fetch(LOCATOR, file))
    assert [wire.address for wire in net.wires] == [TRAINER, RELAY]


def test_a_fetch_ends_after_so_many_parents(net: Net, file: ChunkFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "MAX_MOVES", 3)
    net.parents(*[RELAY] * 9)
    net.unreachable = {RELAY}
    with pytest.raises(WeightError, match="v3 could not be fetched: 3 sources failed in a row"):
        run(net.fetcher.fetch(LOCATOR, file))
    assert len(net.sent(ParentRequest)) == 3
