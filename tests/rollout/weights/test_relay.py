"""What a worker serves to others of the chunks it fetches itself: at once, when they come, or not at all."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.weights.stream import Chunk, ChunkRequest, NoChunk, Payload
from rollout.weights import relay as relay_module
from rollout.weights.chunks import ChunkFile
from rollout.weights.relay import Relay

DATA = np.arange(10, dtype=np.uint8)
PARTS = [DATA[:4], DATA[4:8], DATA[8:]]


class FakeHub:
    def __init__(self, **_: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.inbox: list[tuple[str, Any] | None] = []
        self.is_full = False

    def send(self, peer: str, message: Any) -> bool:
        self.sent.append((peer, message))
        return not self.is_full

    async def receive(self, timeout_s: float) -> tuple[str, Any] | None:
        if not self.inbox:
            raise asyncio.CancelledError
        return self.inbox.pop(0)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Relay:
    monkeypatch.setattr(relay_module, "Hub", FakeHub)
    return Relay(run_id="r", bind="tcp://127.0.0.1:0", curve_dir=tmp_path)


def sent(relay: Relay) -> list[tuple[str, Any]]:
    hub: Any = relay._hub
    messages, hub.sent = hub.sent, []
    return messages


def make_file(tmp_path: Path, name: str = "v1") -> ChunkFile:
    crcs = np.array([zlib.crc32(part.tobytes()) for part in PARTS], np.uint32)
    payload = Payload(name=name, is_delta=False, num_bytes=len(DATA), chunk_bytes=4, chunk_crcs=crcs, manifest=b"{}")
    return ChunkFile(tmp_path / name, payload)


def ask(relay: Relay, peer: str, index: int, name: str = "v1") -> None:
    relay._take(peer, ChunkRequest(payload=name, index=index))


def test_a_chunk_that_is_here_is_sent_at_once_and_counted(relay: Relay, tmp_path: Path) -> None:
    file = make_file(tmp_path)
    assert file.put(1, PARTS[1])
    relay.offer(file)
    ask(relay, "w1", 1)
    ((peer, chunk),) = sent(relay)
    assert isinstance(chunk, Chunk)
    assert (peer, chunk.payload, chunk.index, chunk.data.tolist()) == ("w1", "v1", 1, [4, 5, 6, 7])
    assert relay.counters == {"relayed_chunks": 1.0, "relayed_bytes": 4.0}
    relay._hub.is_full = True  # type: ignore[attr-defined]
    ask(relay, "w1", 1)
    assert relay.counters == {"relayed_chunks": 1.0, "relayed_bytes": 4.0}, "what could not be sent does not count"


def test_all_who_wait_for_a_chunk_get_it_once_when_it_comes(relay: Relay, tmp_path: Path) -> None:
    file = make_file(tmp_path)
    relay.offer(file)
    for peer, index in (("w1", 2), ("w2", 2), ("w2", 2), ("w3", 0)):
        ask(relay, peer, index)
    assert sent(relay) == []
    file.put(2, PARTS[2])
    relay.arrived(file, 2)
    arrived = sent(relay)
    assert sorted((peer, chunk.index, chunk.data.tolist()) for peer, chunk in arrived) == [
        ("w1", 2, [8, 9]), ("w2", 2, [8, 9]),
    ]  # fmt: skip
    relay.arrived(file, 2)
    assert sent(relay) == []


def test_who_waits_for_a_withdrawn_payload_is_refused_with_the_chunk_and_the_reason(
    relay: Relay, tmp_path: Path
) -> None:
    relay.offer(make_file(tmp_path))
    relay.offer(make_file(tmp_path, "v2"))
    ask(relay, "w1", 2)
    ask(relay, "w2", 0, "v2")
    relay.withdraw("v1", "damaged")
    ((peer, refusal),) = sent(relay)
    assert isinstance(refusal, NoChunk)
    assert (peer, refusal.payload, refusal.index, refusal.reason) == ("w1", "v1", 2, "damaged")
    ask(relay, "w1", 2)
    ((_, refusal),) = sent(relay)
    assert refusal.reason == "the file is not on this worker"
    relay.withdraw("v1", "twice")
    assert sent(relay) == []


def test_only_the_named_payloads_are_kept(relay: Relay, tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        relay.offer(make_file(tmp_path, name))
        ask(relay, "w1", 0, name)
    relay.keep_only(frozenset({"v2", "v3"}))
    ((_, refusal),) = sent(relay)
    assert (refusal.payload, refusal.reason) == ("v1", "too old")
    ask(relay, "w2", 1, "v2")
    assert sent(relay) == [], "it waits: the payload is still offered"


@pytest.mark.parametrize("index", [3, -1])
def test_a_chunk_that_no_payload_has_is_refused(relay: Relay, tmp_path: Path, index: int) -> None:
    relay.offer(make_file(tmp_path))
    ask(relay, "w1", index)
    ((_, refusal),) = sent(relay)
    assert (refusal.payload, refusal.index) == ("v1", index)
    assert refusal.reason


def test_no_more_requests_wait_than_the_limit(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_WAITING", 2)
    relay.offer(make_file(tmp_path))
    ask(relay, "w1", 0)
    ask(relay, "w2", 0)
    assert sent(relay) == []
    ask(relay, "w3", 1)
    ((peer, refusal),) = sent(relay)
    assert (peer, refusal.reason) == ("w3", "too many requests are waiting on this worker")


def test_only_requests_for_chunks_are_served(relay: Relay, tmp_path: Path) -> None:
    relay.offer(make_file(tmp_path))
    hub: Any = relay._hub
    hub.inbox = [None, ("w1", NoChunk(payload="v1", index=0, reason="")), ("w2", ChunkRequest(payload="v9", index=0))]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(relay.run())
    ((peer, refusal),) = sent(relay)
    assert (peer, refusal.payload, refusal.reason) == ("w2", "v9", "the file is not on this worker")


def test_a_payload_is_complete_when_every_chunk_matched_its_checksum(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    assert not file.put(0, PARTS[1]), "another chunk's bytes"
    assert not file.put(2, np.zeros(3, np.uint8)), "too long"
    assert file.put(0, PARTS[0].astype(np.int16)) is False, "another type"
    assert file.missing() == [0, 1, 2]
    for index in (2, 0, 0):
        assert file.put(index, PARTS[index])
    assert file.missing() == [1]
    assert not file.is_complete
    assert file.chunk(1) is None
    assert file.put(1, PARTS[1])
    assert file.is_complete
    assert bytes(file.data) == DATA.tobytes()
