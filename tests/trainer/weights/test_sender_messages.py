"""Claims about what a trainer answers rollout workers that ask for weights, message by message, without sockets."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import JoinRequest, NoGroup
from areal_like.weights.stream import (
    Chunk,
    ChunkRequest,
    Locator,
    ParentRequest,
    TransferPlan,
    TransferUnavailable,
    UpstreamPeer,
    WayRequest,
)
from areal_like.weights.weight_store import WeightManifest, WeightStore
from areal_like.wire.messages import Goodbye, Hello, Message
from trainer.weights import sender as sender_module
from trainer.weights.sender import SILENT_S, WeightSender

LIMIT_S = 300.0
CHUNK_BYTES = 64


class FakeHub:
    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.sent: list[tuple[str, Message]] = []
        self.coming: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self.forgotten: list[str] = []
        self.silent_names: list[str] = []
        self.silence_asked: set[float] = set()
        self.is_closed = False

    async def start(self) -> str:
        return "tcp://127.0.0.1:77"

    async def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        try:
            return await asyncio.wait_for(self.coming.get(), min(timeout_s, 0.01))
        except TimeoutError:
            return None

    def send(self, peer: str, message: Message) -> bool:
        self.sent.append((peer, message))
        return True

    def silent(self, silence_s: float) -> list[str]:
        self.silence_asked.add(silence_s)
        found, self.silent_names = self.silent_names, []
        return found

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)

    async def close(self) -> None:
        self.is_closed = True


class FakeRounds:
    """What brings versions by a process group."""

    def __init__(self, send: Any) -> None:
        self.log: list[Any] = []
        self.counters = {"weights_group_rounds": 4.0}

    async def run(self) -> None:
        self.log.append("runs")
        await asyncio.Event().wait()

    def offer(self, manifest_path: Path) -> None:
        self.log.append(("offer", manifest_path))

    def join(self, peer: str, request: JoinRequest) -> None:
        self.log.append(("join", peer, request.version))

    def left(self, peer: str) -> None:
        self.log.append(("left", peer))

    async def close(self) -> None:
        self.log.append("closed")


class Stage:
    """A sender over a store with one version of two tensors."""

    def __init__(self, folder: Path, *, has_rounds: bool) -> None:
        store = WeightStore(folder / "store", "disk", keep=9)
        arrays = {"a": np.arange(40, dtype=np.float32), "b": np.arange(3, dtype=np.float32)}
        self.path = store.publish(1, "l0", {k: TensorBytes("float32", v.shape, v.data) for k, v in arrays.items()})
        self.manifest = msgspec.json.decode(self.path.read_bytes(), type=WeightManifest)
        self.sender = WeightSender(
            folder / "store", run_id="r", bind="tcp://127.0.0.1:*", curve_dir=folder, chunk_bytes=CHUNK_BYTES,
            fan_out=2,
            make_rounds=FakeRounds if has_rounds else None,  # type: ignore[arg-type]
        )  # fmt: skip
        self.hub: Any = self.sender._hub
        self.rounds: Any = self.sender._rounds

    def ask(self, message: Message, peer: str = "w1") -> None:
        self.hub.coming.put_nowait((peer, message))

    async def answer(self, message: Message, peer: str = "w1") -> Any:
        before = len(self.hub.sent)
        self.ask(message, peer)
        await self.until(lambda: len(self.hub.sent) > before)
        to, found = self.hub.sent[-1]
        assert to == peer
        return found

    async def until(self, is_true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "Hub", FakeHub)


def play(folder: Path, scene: Callable[[Stage], Coroutine[Any, Any, None]], *, has_rounds: bool = False) -> Stage:
    async def run() -> Stage:
        stage = Stage(folder, has_rounds=has_rounds)
        await stage.sender.start()
        serving = asyncio.create_task(stage.sender.run())
        try:
            await scene(stage)
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            await stage.sender.close()
        assert stage.hub.is_closed
        return stage

    return asyncio.run(run())


def way(version: int = 1, lineage: str = "l0") -> WayRequest:
    return WayRequest(version=version, lineage=lineage, base_version=-1, base_digest="")


def test_version_is_planned_with_checksums_and_comes_chunk_by_chunk(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        plan = await stage.answer(way())
        assert isinstance(plan, TransferPlan)
        assert (plan.version, plan.lineage) == (1, "l0")
        (payload,) = plan.payloads
        assert (payload.name, payload.is_delta, payload.chunk_bytes) == (stage.manifest.payload, False, CHUNK_BYTES)
        assert msgspec.json.decode(payload.manifest, type=WeightManifest) == stage.manifest
        content = stage.path.with_name(payload.name).read_bytes()
        assert payload.num_bytes == len(content)
        chunks = []
        for index in range(payload.num_chunks):
            chunk = await stage.answer(ChunkRequest(payload=payload.name, index=index))
            assert isinstance(chunk, Chunk)
            assert zlib.crc32(chunk.data.tobytes()) == int(payload.chunk_crcs[index])
            chunks.append(chunk.data.tobytes())
        assert b"".join(chunks) == content
        assert stage.sender.counters["weights_sent_bytes"] == len(content)

    play(tmp_path, scene)


def test_version_that_is_not_there_is_answered_with_why_and_the_worker_may_ask_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        for request in (way(9), way(1, "other")):
            answer = await stage.answer(request)
            assert isinstance(answer, TransferUnavailable)
            assert (answer.version, answer.lineage) == (request.version, request.lineage)
            assert answer.reason
        assert isinstance(await stage.answer(way()), TransferPlan)

    play(tmp_path, scene)


def test_impatient_worker_gets_one_answer_to_what_it_asked_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_open = threading.Event()

    async def scene(stage: Stage) -> None:
        open_way = stage.sender._open_way

        def held_back(*arguments: Any) -> Any:
            assert may_open.wait(LIMIT_S)
            return open_way(*arguments)

        monkeypatch.setattr(stage.sender, "_open_way", held_back)
        for _ in range(3):
            stage.ask(way())
        stage.ask(ChunkRequest(payload="none", index=0), "w2")
        await stage.until(lambda: stage.hub.sent)  # what came before it was taken
        may_open.set()
        await stage.until(lambda: len(stage.hub.sent) == 2)
        await stage.answer(way(), "w3")
        assert [peer for peer, _ in stage.hub.sent] == ["w2", "w1", "w3"]

    play(tmp_path, scene)


def test_first_workers_fetch_from_the_trainer_and_later_ones_from_them(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        name = stage.manifest.payload
        await stage.answer(way())
        sources = []
        for peer in ("w1", "w2", "w3"):
            answer = await stage.answer(ParentRequest(payload=name, address=f"a-{peer}", lost=""), peer)
            assert isinstance(answer, UpstreamPeer)
            assert answer.payload == name
            sources.append(answer.address)
        assert sources[:2] == ["tcp://127.0.0.1:77"] * 2
        assert sources[2] in ("a-w1", "a-w2")

    play(tmp_path, scene)


@pytest.mark.parametrize("how", ["goodbye", "silent"])
def test_worker_that_is_gone_leaves_the_trees_and_the_group(how: str, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.answer(way())
        await stage.answer(ParentRequest(payload=stage.manifest.payload, address="a-w1", lost=""))
        tree = stage.sender.trees()[stage.manifest.payload]
        assert tree.parent_of("w1") is not None
        if how == "goodbye":
            stage.ask(Goodbye(reason="x"))
        else:
            stage.hub.silent_names = ["w1"]
        await stage.until(lambda: stage.hub.forgotten == ["w1"])
        assert tree.parent_of("w1") is None
        assert ("left", "w1") in stage.rounds.log
        assert stage.hub.silence_asked == {SILENT_S}

    play(tmp_path, scene, has_rounds=True)


def test_requests_for_a_group_go_to_the_rounds_and_without_any_are_refused(tmp_path: Path) -> None:
    async def with_rounds(stage: Stage) -> None:
        stage.ask(JoinRequest(version=1, lineage="l0"))
        stage.ask(Hello(role="rollout", name="w2", pid=1, run_id="r", incarnation="x"), "w2")
        await stage.until(lambda: ("left", "w2") in stage.rounds.log)
        assert stage.rounds.log[:2] == ["runs", ("join", "w1", 1)]
        assert stage.hub.sent == []
        assert stage.sender.counters["weights_group_rounds"] == 4.0

    assert play(tmp_path / "a", with_rounds, has_rounds=True).rounds.log[-1] == "closed"

    async def without(stage: Stage) -> None:
        stage.ask(Hello(role="rollout", name="w1", pid=1, run_id="r", incarnation="x"))
        answer = await stage.answer(JoinRequest(version=1, lineage="l0"))
        assert answer == NoGroup(version=1, lineage="l0", reason="the trainer has no process group")

    play(tmp_path / "b", without)


@pytest.mark.parametrize("has_rounds", [False, True])
def test_announced_place_says_where_and_whether_by_a_group(has_rounds: bool, tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        place = await stage.sender.publish(stage.path, 1, "l0")
        assert place == str(Locator("tcp://127.0.0.1:77", 1, "l0", by_group=has_rounds))
        if has_rounds:
            assert ("offer", stage.path) in stage.rounds.log

    play(tmp_path, scene, has_rounds=has_rounds)
