"""Who takes part in a round, when it begins, and what becomes of the group afterwards. The wire is played."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from areal_like.errors import TransferBroken
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall, JoinRequest, NoGroup, buckets
from areal_like.weights.weight_store import WeightManifest, WeightStore, open_payload
from trainer.config import GroupSettings
from trainer.weights import group_rounds
from trainer.weights.group_rounds import FIRST_S, GroupRounds

PATIENCE_S = 300.0


class PlayedRoot:
    """Stands for the wire: notes what it was made for and brought."""

    made: ClassVar[list[PlayedRoot]] = []
    is_broken = False

    def __init__(self, name: str, size: int, **settings: object) -> None:
        self.name, self.size, self.host, self.port = name, size, settings["host"], 4711
        self.backend, self.num_brought, self.has_left = settings["backend"], 0, False
        self.settings = settings
        PlayedRoot.made.append(self)

    def bring(self, manifest: object, payload: memoryview, bucket_bytes: int) -> None:
        if PlayedRoot.is_broken:
            raise TransferBroken("the wire was cut")
        self.num_brought += 1

    def leave(self) -> None:
        self.has_left = True


class Stage:
    """Rounds over a played wire, and what the workers were sent."""

    def __init__(self, root: Path, **settings: float) -> None:
        self.store = WeightStore(root / "store", "disk", keep=9)
        self.sent: list[tuple[str, GroupCall | NoGroup]] = []
        self.settings = GroupSettings(**settings)
        self.rounds = GroupRounds(self.settings, run_id="r", host="127.0.0.1", device="cpu", send=self._send)

    def _send(self, peer: str, message: GroupCall | NoGroup) -> bool:
        self.sent.append((peer, message))
        return True

    def offer(self, version: int, lineage: str = "l0") -> None:
        array = np.full(8, version, np.float32)
        self.rounds.offer(self.store.publish(version, lineage, {"w": TensorBytes("float32", (8,), array.data)}))

    def join(self, *peers: str, version: int, num_ranks: int = 1, lineage: str = "l0") -> None:
        for peer in peers:
            self.rounds.join(peer, JoinRequest(version=version, lineage=lineage, num_ranks=num_ranks))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what is waited for is a thread's progress
                await asyncio.sleep(0.001)

    async def held(self, num_rounds: int) -> None:
        counters = self.rounds.counters
        done = lambda: counters["weights_group_rounds"] + counters["weights_group_broken"]  # noqa: E731
        await self.until(lambda: done() == num_rounds)

    def calls(self, version: int) -> dict[str, GroupCall]:
        return {p: call for p, call in self.sent if isinstance(call, GroupCall) and call.version == version}

    def refusals(self) -> dict[tuple[str, int], str]:
        return {(peer, no.version): no.reason for peer, no in self.sent if isinstance(no, NoGroup)}


@pytest.fixture
def play(tmp_path, monkeypatch):
    PlayedRoot.made, PlayedRoot.is_broken = [], False
    monkeypatch.setattr(group_rounds, "GroupRoot", PlayedRoot)

    def start(scenario, **settings):
        async def all_of_it():
            stage = Stage(tmp_path, **{"gather_s": 0.05, **settings})
            running = asyncio.create_task(stage.rounds.run())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await scenario(stage)
            finally:
                running.cancel()
                await stage.rounds.close()

        asyncio.run(all_of_it())

    return start


def test_members_get_places_side_by_side_and_the_same_group_serves_again(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", version=0, num_ranks=2)
        stage.join("b", version=0)
        await stage.held(1)
        calls = stage.calls(0)
        assert {peer: (call.rank, call.size, call.is_new) for peer, call in calls.items()} == {
            "a": (1, 4, True),
            "b": (3, 4, True),
        }
        stage.offer(1)
        stage.join("b", version=1)
        stage.join("a", version=1, num_ranks=2)
        await stage.held(2)
        assert [call.is_new for call in stage.calls(1).values()] == [False, False]
        assert stage.calls(1)["a"].group == calls["a"].group
        assert len(PlayedRoot.made) == 1

    play(scenario)


def test_the_same_members_with_another_backend_get_another_group(play, monkeypatch):
    async def scenario(stage):
        for version, backend in enumerate(("gloo", "nccl")):
            monkeypatch.setattr(stage.rounds, "_backend", lambda round_, backend=backend: backend)
            stage.offer(version)
            stage.join("a", version=version)
            await stage.held(version + 1)
        assert [root.backend for root in PlayedRoot.made] == ["gloo", "nccl"]
        assert stage.calls(1)["a"].is_new

    play(scenario)


def test_a_trainer_that_started_again_makes_no_group_of_the_name_its_workers_are_in_already(play):
    names = []

    def life(lineage):
        async def scenario(stage):
            stage.offer(0, lineage)
            stage.join("a", version=0, lineage=lineage)
            await stage.held(1)
            names.append(stage.calls(0)["a"].group)

        return scenario

    play(life("l0"))
    play(life("l1"))
    assert names[0] != names[1]


def test_a_round_waits_for_those_of_the_last_one_and_no_longer_than_it_must(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        await stage.held(1)
        stage.offer(1)
        stage.join("a", version=1)
        await asyncio.sleep(0)
        assert not stage.calls(1)
        stage.rounds.left("b")  # dead: nobody waits for it, and the group with it is void
        await stage.held(2)
        assert set(stage.calls(1)) == {"a"}
        assert stage.calls(1)["a"].is_new

    play(scenario, gather_s=PATIENCE_S * 2)


def test_a_worker_that_does_not_come_costs_the_others_the_gathering_time_once(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        await stage.held(1)
        stage.offer(1)
        stage.join("a", version=1)
        await stage.held(2)  # by the clock
        assert set(stage.calls(1)) == {"a"}
        stage.join("b", version=1)
        assert "has already started" in stage.refusals()["b", 1]
        stage.offer(2)
        stage.join("a", "b", version=2)
        await stage.held(3)
        assert set(stage.calls(2)) == {"a", "b"}
        assert stage.calls(2)["a"].group != stage.calls(1)["a"].group

    play(scenario)


def test_whatever_is_not_the_newest_version_comes_as_a_stream(play):
    async def scenario(stage):
        stage.join("a", version=0)
        assert ("a", 0) in stage.refusals()
        stage.offer(1)
        stage.join("a", version=0)
        stage.offer(2)
        stage.join("b", version=2)
        stage.offer(3)  # b waits for a version that is old by now
        assert stage.refusals()["b", 2] == "a newer version was published"

    play(scenario, gather_s=PATIENCE_S)


def test_after_a_broken_transfer_the_next_version_gets_another_group(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        await stage.held(1)
        PlayedRoot.is_broken = True
        stage.offer(1)
        stage.join("a", "b", version=1)
        await stage.until(lambda: PlayedRoot.made[0].has_left)  # members in it notice that we are gone
        await stage.held(2)
        PlayedRoot.is_broken = False
        stage.offer(2)
        stage.join("a", "b", version=2)
        await stage.held(3)
        assert all(call.is_new for call in stage.calls(2).values())
        assert stage.rounds.counters["weights_group_broken"] == 1

    play(scenario)


def test_a_worker_that_asks_again_gets_the_same_call(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", version=0)
        await stage.held(1)
        stage.join("a", version=0)
        first, again = (call for _, call in stage.sent)
        assert first == again

    play(scenario)


def test_buckets_are_whole_tensors_and_cover_the_payload_once(tmp_path):
    dice = np.random.default_rng(0)
    sizes = [int(size) for size in dice.integers(0, 90, 40)]
    tensors = {
        f"t{index}": TensorBytes("bfloat16" if index % 3 else "float32", (size,), bytes_of(size, index % 3))
        for index, size in enumerate(sizes)
    }
    store = WeightStore(tmp_path, "disk", keep=1)
    manifest, _ = open_payload(store.publish(0, "l0", tensors))
    cut = list(buckets(manifest, 400))
    at = min(entry.offset for entry in manifest.tensors)
    for bucket in cut:
        assert bucket.offset == at
        assert bucket.num_bytes <= 400 or len(bucket.entries) == 1
        at += bucket.num_bytes
    assert at == manifest.num_bytes
    assert {entry.name for bucket in cut for entry in bucket.entries} == {
        entry.name for entry in manifest.tensors if entry.num_bytes
    }


def bytes_of(size: int, is_half: int) -> memoryview:
    return memoryview(bytes(size * (2 if is_half else 4)))


class Clock:
    """It stands still unless a test moves it: whatever begins too early is seen."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    played = Clock()
    monkeypatch.setattr(group_rounds, "time", played)
    return played


async def looked(stage, times: int = 20) -> None:
    """The rounds have looked at the clock again."""
    for _ in range(times):
        await asyncio.sleep(0.001)
        stage.rounds._changed.set()


def test_missing_worker_is_waited_for_until_the_time_to_gather_is_over(play, clock):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        await looked(stage)
        clock.now_s += 0.5
        await looked(stage)
        await stage.held(1)
        stage.offer(1)
        stage.join("a", version=1)
        await looked(stage)
        assert not stage.calls(1)
        clock.now_s += 0.5
        stage.rounds._changed.set()
        await stage.until(lambda: stage.calls(1))
        assert set(stage.calls(1)) == {"a"}

    play(scenario, gather_s=0.5)


@pytest.mark.parametrize(("gather_s", "begins_s"), [(40.0, FIRST_S), (0.25, 0.25)])
def test_a_round_without_anybody_to_wait_for_gathers_for_a_moment(play, clock, gather_s, begins_s):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", version=0)
        await looked(stage)
        clock.now_s += begins_s - 0.125
        await looked(stage)
        assert not stage.calls(0)
        clock.now_s += 0.125
        await looked(stage)
        await stage.until(lambda: stage.calls(0))

    play(scenario, gather_s=gather_s)


def test_a_round_begins_at_once_when_all_of_the_last_one_are_there(play, clock):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        await looked(stage)
        clock.now_s += FIRST_S
        await looked(stage)
        await stage.held(1)
        stage.offer(1)
        stage.join("c", "a", version=1)
        await looked(stage)
        assert not stage.calls(1)
        stage.join("b", version=1)
        await stage.until(lambda: stage.calls(1))
        assert {peer: call.rank for peer, call in stage.calls(1).items()} == {"a": 1, "b": 2, "c": 3}

    play(scenario, gather_s=PATIENCE_S)


def test_a_worker_that_left_before_the_round_is_not_called_and_one_of_no_group_voids_none(play):
    async def scenario(stage):
        stage.offer(0)
        stage.join("a", "b", version=0)
        stage.rounds.left("b")
        await stage.held(1)
        assert set(stage.calls(0)) == {"a"}
        stage.rounds.left("z")
        stage.offer(1)
        stage.join("a", version=1)
        await stage.held(2)
        assert not stage.calls(1)["a"].is_new
        stage.rounds.left("a")
        stage.offer(2)
        stage.join("a", version=2)
        await stage.held(3)
        assert stage.calls(2)["a"].is_new, "another process of this name is in no group"

    play(scenario)


def test_refusals_say_why(play):
    async def scenario(stage):
        stage.join("a", version=0)
        stage.offer(0)
        stage.join("b", version=0)
        await stage.held(1)
        stage.join("c", version=0)
        stage.join("d", version=0, lineage="l9")
        stage.offer(1)
        stage.join("e", version=1)
        stage.offer(2)
        other = "this version is not the newest, or its transfer has ended"
        assert stage.refusals() == {
            ("a", 0): other, ("c", 0): "the transfer of this version has already started", ("d", 0): other,
            ("e", 1): "a newer version was published",
        }  # fmt: skip

    play(scenario)


def test_a_call_says_all_that_a_member_needs_and_rounds_are_counted(play):
    async def scenario(stage):
        stage.offer(3, "l2")
        stage.join("a", version=3, lineage="l2")
        await stage.held(1)
        (call,) = stage.calls(3).values()
        manifest = msgspec.json.decode(call.manifest, type=WeightManifest)
        assert (call.version, call.lineage, call.group) == (3, "l2", "r.l2.weights.1")
        assert (call.host, call.port, call.backend, call.rank, call.size) == ("127.0.0.1", 4711, "gloo", 1, 2)
        assert (call.bucket_bytes, call.deadline_s) == (stage.settings.bucket_bytes, 7.5)
        assert (manifest.version, manifest.num_bytes >= 32) == (3, True)
        assert stage.rounds.counters == {
            "weights_group_rounds": 1.0, "weights_group_broken": 0.0, "weights_group_generations": 1.0,
            "weights_group_bytes": float(manifest.num_bytes),
        }  # fmt: skip
        assert PlayedRoot.made[0].settings == {
            "host": "127.0.0.1", "backend": "gloo", "device": "cpu", "deadline_s": 7.5
        }  # fmt: skip

    play(scenario, transfer_s=7.5)
    (root,) = PlayedRoot.made
    for thread in [one for one in threading.enumerate() if one.name.startswith("weights-group")]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert root.has_left, "the end leaves the group"


@pytest.mark.parametrize(
    ("configured", "own", "devices", "backend"),
    [
        ("auto", "cuda:0", ("cuda", "cuda"), "nccl"), ("auto", "cuda:0", ("cuda", "cpu"), "gloo"),
        ("auto", "cpu", ("cuda",), "gloo"), ("gloo", "cuda", ("cuda",), "gloo"), ("nccl", "cpu", ("cpu",), "nccl"),
    ],
)  # fmt: skip
def test_nccl_is_taken_where_it_is_configured_or_every_end_is_a_gpu(configured, own, devices, backend):
    settings = GroupSettings(backend=configured)
    rounds = GroupRounds(settings, run_id="r", host="h", device=own, send=lambda *_: True)
    joined = {
        str(number): JoinRequest(version=0, lineage="l0", num_ranks=1, device=device)
        for number, device in enumerate(devices)
    }
    offer = group_rounds._Round(0, "l0", None, memoryview(b""), joined)
    assert rounds._backend(offer) == backend
