"""A worker's way through a version that may come by a process group: called, late, broken off, or damaged."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from made_keys import run_keys

from areal_like.clock import SystemClock
from areal_like.errors import TransferBroken, WeightError
from areal_like.trace import Tracer
from areal_like.transport.channel import Peer
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.process_group import GroupCall
from areal_like.wire import messages as m
from rollout.activity import WorkerActivity
from rollout.engine.port import EngineCapabilities, LoadReport
from rollout.weights.port import JoinAs
from rollout.weights.receiver import VersionReceiver
from rollout.weights.relay import Relay
from rollout.weights.versions import VersionGate, VersionLoader
from trainer.config import GroupSettings, WeightStoreSettings
from trainer.weights import group_rounds
from trainer.weights.group_rounds import GroupRounds
from trainer.weights.sender import WeightSender
from trainer.weights.version_writer import VersionWriter

RUN = "run-1"
PATIENCE_S = 300.0


class SilentRoot:
    """A wire on which nothing is lost and nothing is sent."""

    def __init__(self, name: str, size: int, **settings: object) -> None:
        self.name, self.size, self.host, self.port, self.backend = name, size, "127.0.0.1", 4711, "gloo"

    def bring(self, *payload: object) -> None:
        pass

    def leave(self) -> None:
        pass


class PlayedEngine:
    """Takes whatever it is given, by either way, unless set to fail."""

    def __init__(self) -> None:
        self.capabilities = EngineCapabilities(
            num_slots=1, max_context=9, interruptions=("recompute",), per_request_seed=True, group_ranks=1
        )
        self.version, self.ways = -1, list[str]()
        self.failure: Exception | None = None

    async def load_version(self, manifest_path: Path, interruption: str) -> LoadReport:
        self.ways.append("stream")
        return self._loaded(int(manifest_path.name[1:].partition("-")[0]))

    async def load_from_group(self, call: GroupCall, interruption: str) -> LoadReport:
        self.ways.append("group")
        if self.failure is not None:
            raise self.failure
        return self._loaded(call.version)

    async def release_memory(self) -> int:
        self.version = -1
        return 1000

    def _loaded(self, version: int) -> LoadReport:
        self.version = version
        return LoadReport(version=version, stage_s=0.0, pause_s=0.0)


class Site:
    """A trainer's sender with rounds, and one worker's loader and receiver."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.writer = VersionWriter(tmp_path / "store", WeightStoreSettings(kind="distributed"))
        self.sender = WeightSender(
            tmp_path / "store", run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=run_keys(), chunk_bytes=4096, fan_out=1,
            make_rounds=lambda send: GroupRounds(
                GroupSettings(gather_s=0.05), run_id=RUN, host="127.0.0.1", device="cpu", send=send
            ),
        )  # fmt: skip
        self.engine, self.said = PlayedEngine(), list[m.Message]()
        self.receiver = VersionReceiver(
            [tmp_path / "local"],
            make_wire=self._wire,
            make_relay=lambda: Relay(run_id=RUN, bind="tcp://127.0.0.1:*", curve_dir=run_keys()),
        )
        tracer = Tracer(tmp_path / "w.trace.jsonl", "w")
        self.loader = VersionLoader(
            engine=self.engine, gate=VersionGate(), interruption="recompute", report=self.said.append,
            park_all=lambda: None, doing=WorkerActivity(SystemClock(), tracer), tracer=tracer, receiver=self.receiver,
        )  # fmt: skip

    def _wire(self, address: str, accept: frozenset[type]) -> Peer:
        hello = m.Hello(role="rollout", name="rollout-0", pid=1, run_id=RUN, incarnation="i")
        return Peer(
            address=address, hello=hello, curve_dir=run_keys(), audience="services", accept=accept,
            heartbeat_s=0.1, silence_s=5.0, status=lambda: m.Heartbeat(state="fetch"),
        )  # fmt: skip

    async def publish(self, version: int) -> str:
        data = memoryview(bytes([version]) * 4000)
        written = self.writer.write(version, "l0", {"w": TensorBytes("float32", (1000,), data)})
        return await self.sender.publish(written.path, version, "l0")

    async def load(self, version: int, place: str) -> m.Message:
        self.loader.announce(m.AnnounceVersion(version=version, lineage="l0", manifest_path=place, deadline_s=10.0))
        num_said = len(self.said)
        while len(self.said) == num_said:  # noqa: ASYNC110 - the loader's own loop is what runs
            await asyncio.sleep(0.002)
        return self.said[-1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(group_rounds, "GroupRoot", SilentRoot)

    def start(scenario):
        async def all_of_it():
            made = Site(tmp_path)
            await made.sender.start()
            tasks = [asyncio.create_task(made.sender.run()), asyncio.create_task(made.loader.run())]
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await scenario(made)
            finally:
                for task in tasks:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                await made.receiver.close()
                await made.sender.close()

        asyncio.run(all_of_it())

    return start


def test_a_worker_in_time_takes_the_version_by_the_group(site):
    async def scenario(s):
        for version in (0, 1):
            said = await s.load(version, await s.publish(version))
            assert isinstance(said, m.VersionLoaded)
            assert said.version == version
        assert s.engine.ways == ["group", "group"]

    site(scenario)


def test_a_worker_that_was_away_catches_up_by_stream_and_is_called_again_afterwards(site):
    async def scenario(s):
        first = await s.publish(0)
        newer = await s.publish(1)
        assert isinstance(await s.load(0, first), m.VersionLoaded)  # not the newest: an evaluation may want it
        assert isinstance(await s.load(1, newer), m.VersionLoaded)
        assert s.engine.ways == ["stream", "group"]

    site(scenario)


def test_a_transfer_that_breaks_off_is_followed_by_the_stream_of_the_same_version(site):
    async def scenario(s):
        s.engine.failure = TransferBroken("a member died")
        said = await s.load(0, await s.publish(0))
        assert isinstance(said, m.VersionLoaded)
        assert s.engine.ways == ["group", "stream"]
        assert s.engine.version == 0
        assert s.loader.counters()["versions_broken"] == 1

    site(scenario)


def test_a_damaged_payload_is_the_workers_failure_and_the_retry_comes_as_a_stream(site):
    async def scenario(s):
        s.engine.failure = WeightError("checksum differs")
        place = await s.publish(0)
        said = await s.load(0, place)
        assert isinstance(said, m.VersionFailed), "the controller quarantines it"
        assert "checksum" in said.reason
        assert isinstance(await s.load(0, place), m.VersionLoaded)
        assert s.engine.ways == ["group", "stream"]

    site(scenario)


def test_an_engine_that_takes_no_place_in_a_group_is_never_called(site):
    async def scenario(s):
        place = await s.publish(0)
        assert await s.receiver.meet(place, 5.0, JoinAs(0, "cpu")) is None
        assert await s.receiver.meet(str(s.tmp_path / "v0.manifest.json"), 5.0, JoinAs(1, "cpu")) is None

    site(scenario)


def test_memory_is_released_once_and_a_version_announced_before_does_not_take_it_again(site):
    async def scenario(s):
        await s.load(0, await s.publish(0))
        s.loader.announce(m.AnnounceVersion(version=1, lineage="l0", manifest_path=await s.publish(1), deadline_s=10.0))
        s.loader.release(7)
        while not isinstance(s.said[-1], m.MemoryReleased):  # noqa: ASYNC110 - the loader's own loop is what runs
            await asyncio.sleep(0.002)
        assert (s.said[-1].number, s.said[-1].num_bytes) == (7, 1000)
        assert s.engine.version == -1
        assert s.loader.loaded is None
        loaded = await s.load(0, (await s.publish(2)).replace("v00000002", "v00000000"))
        assert isinstance(loaded, m.VersionLoaded), "the same version is loaded again: there is none any more"

    site(scenario)
