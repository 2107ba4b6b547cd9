"""Which payloads a trainer keeps open, what it sends of them, and whom it names as their source."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_like.errors import WeightError
from areal_like.weights.stream import Chunk, ChunkRequest, NoChunk, ParentRequest, Payload, TransferPlan, WayRequest
from trainer.weights import sender as sender_module
from trainer.weights.fan_out import ROOT, FanOutTree
from trainer.weights.sender import IDLE_S, WeightSender, _Open


class FakeHub:
    def __init__(self, **_: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.forgotten: list[str] = []
        self.is_full = False

    def send(self, peer: str, message: Any) -> bool:
        self.sent.append((peer, message))
        return not self.is_full

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sender_module, "time", clock)
    return clock


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> WeightSender:
    monkeypatch.setattr(sender_module, "Hub", FakeHub)
    return WeightSender(tmp_path, run_id="r", bind="tcp://127.0.0.1:0", curve_dir=tmp_path, chunk_bytes=4, fan_out=1)


def opened(tmp_path: Path, name: str, *, has_file: bool = True) -> _Open:
    payload = Payload(
        name=name, is_delta=False, num_bytes=6, chunk_bytes=4, chunk_crcs=np.zeros(2, np.uint32), manifest=b"{}"
    )
    path = tmp_path / name
    if has_file:
        path.touch()
    return _Open(payload, path, memoryview(bytes(range(6))), FanOutTree("root", 1))


def ask(sender: WeightSender, index: int, name: str = "v1") -> Any:
    sender._send_chunk("w1", ChunkRequest(payload=name, index=index))
    hub: Any = sender._hub
    peer, message = hub.sent.pop()
    assert peer == "w1"
    return message


def test_a_chunk_is_sent_with_its_bytes_and_counted(sender: WeightSender, tmp_path: Path) -> None:
    sender._keep(opened(tmp_path, "v1"))
    chunk = ask(sender, 1)
    assert isinstance(chunk, Chunk)
    assert (chunk.payload, chunk.index, chunk.data.tolist()) == ("v1", 1, [4, 5])
    counted = {"weights_sent_chunks": 1.0, "weights_sent_bytes": 2.0}
    assert counted.items() <= sender.counters.items()
    sender._hub.is_full = True  # type: ignore[attr-defined]
    ask(sender, 0)
    assert counted.items() <= sender.counters.items(), "what could not be sent does not count"
    assert sender.counters["weights_refused_chunks"] == 0.0


@pytest.mark.parametrize(("name", "index"), [("v2", 0), ("v1", 2), ("v1", -1)])
def test_a_chunk_that_is_not_there_is_refused_and_counted(
    sender: WeightSender, tmp_path: Path, name: str, index: int
) -> None:
    sender._keep(opened(tmp_path, "v1"))
    refusal = ask(sender, index, name)
    assert isinstance(refusal, NoChunk)
    assert (refusal.payload, refusal.index) == (name, index)
    assert sender.counters["weights_refused_chunks"] == 1.0
    assert sender.counters["weights_sent_chunks"] == 0.0


def test_of_too_many_payloads_the_one_not_asked_for_longest_is_closed(
    sender: WeightSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "MAX_PAYLOADS", 2)
    sender._keep(opened(tmp_path, "v1"))
    sender._keep(opened(tmp_path, "v2"))
    sender._parent("w1", ParentRequest(payload="v1", address="a1", lost=""))
    sender._keep(opened(tmp_path, "v3"))
    assert list(sender.trees()) == ["v1", "v3"]
    sender._keep(opened(tmp_path, "v1"))
    sender._keep(opened(tmp_path, "v4"))
    assert list(sender.trees()) == ["v1", "v4"]


@pytest.mark.parametrize(
    ("has_file", "idle_s", "is_kept"), [(False, IDLE_S, True), (False, IDLE_S + 1, False), (True, IDLE_S + 1, True)]
)
def test_a_deleted_payload_is_closed_once_nobody_asks_for_it(
    sender: WeightSender, tmp_path: Path, clock: Clock, has_file: bool, idle_s: float, is_kept: bool
) -> None:
    sender._keep(opened(tmp_path, "v1", has_file=has_file))
    clock.now_s += 50.0
    ask(sender, 0)
    clock.now_s += idle_s
    sender._keep(opened(tmp_path, "v2"))
    assert ("v1" in sender.trees()) is is_kept


def test_a_payload_that_is_open_keeps_its_tree_when_it_is_opened_again(sender: WeightSender, tmp_path: Path) -> None:
    first = opened(tmp_path, "v1")
    sender._keep(first)
    sender._keep(opened(tmp_path, "v1"))
    assert sender.trees()["v1"] is first.tree


def test_payloads_of_a_version_written_again_are_closed_and_no_others(sender: WeightSender, tmp_path: Path) -> None:
    for name in ("v00000001-l0.full", "v00000001-l0.delta", "v00000001-l1.full", "v00000011-l0.full"):
        sender._keep(opened(tmp_path, name))
    sender.rewritten(1, "l0")
    assert sorted(sender.trees()) == ["v00000001-l1.full", "v00000011-l0.full"]


@pytest.mark.parametrize("is_missing", [False, True])
def test_what_was_opened_while_a_version_was_written_again_is_opened_once_more(
    sender: WeightSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    """Payloads of the old files would be found damaged, and cost another rewrite."""
    before, after = (opened(tmp_path, "v00000001-l0.full") for _ in range(2))
    calls: list[int] = []

    def open_way(version: int, *_: object) -> list[_Open]:
        calls.append(version)
        if len(calls) > 1:
            return [after]
        sender.rewritten(version, "l0")
        if is_missing:
            raise WeightError("the file is gone")
        return [before]

    monkeypatch.setattr(sender, "_open_way", open_way)
    asyncio.run(sender._answer("w1", WayRequest(version=1, lineage="l0", base_version=-1, base_digest="")))
    assert calls == [1, 1]
    assert sender._payloads["v00000001-l0.full"] is after
    ((_, plan),) = sender._hub.sent  # type: ignore[attr-defined]
    assert isinstance(plan, TransferPlan)


def test_a_worker_that_lost_its_source_gets_another_and_one_that_left_is_nobodys_source(
    sender: WeightSender, tmp_path: Path
) -> None:
    sender._keep(opened(tmp_path, "v1"))

    def source(peer: str, lost: str = "", payload: str = "v1") -> str:
        return sender._parent(peer, ParentRequest(payload=payload, address=f"a-{peer}", lost=lost))

    assert source("w1", payload="v9") == ""
    assert (source("w1"), source("w2"), source("w3")) == ("root", "a-w1", "a-w2")
    assert sender.counters["weights_moved_children"] == 0.0
    assert source("w3", lost="a-w2") != "a-w2"
    assert sender.counters["weights_moved_children"] == 1.0
    sender._forget("w1")
    assert sender._hub.forgotten == ["w1"]  # type: ignore[attr-defined]
    tree = sender.trees()["v1"]
    assert (tree.parent_of("w1"), tree.parent_of("w3")) == (None, ROOT)
