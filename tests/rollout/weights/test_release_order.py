"""The loader carries out releases and announcements in the order they came, whatever is under way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.clock import SystemClock
from areal_like.trace import Tracer
from areal_like.wire import messages as m
from rollout.activity import WorkerActivity
from rollout.engine.port import EngineCapabilities, LoadReport
from rollout.weights.versions import VersionGate, VersionLoader


class SlowEngine:
    """Loads and releases end when the test lets them."""

    capabilities = EngineCapabilities(
        num_slots=1, max_context=9, interruptions=("recompute",), per_request_seed=True, group_ranks=0
    )

    def __init__(self) -> None:
        self.version, self.has_memory = -1, False
        self.may_go_on = asyncio.Event()

    async def load_version(self, manifest_path: Path, interruption: str) -> LoadReport:
        self.has_memory = True
        await self.may_go_on.wait()
        self.version = int(manifest_path.name)
        return LoadReport(version=self.version, stage_s=0.0, pause_s=0.0)

    async def release_memory(self) -> int:
        await self.may_go_on.wait()
        self.version, self.has_memory = -1, False
        return 1000


class Bench:
    def __init__(self, tmp_path: Path) -> None:
        self.engine, self.said = SlowEngine(), list[m.Message]()
        tracer = Tracer(tmp_path / "w.trace.jsonl", "w")
        self.loader = VersionLoader(
            engine=self.engine, gate=VersionGate(), interruption="recompute", report=self.said.append,
            park_all=lambda: None, doing=WorkerActivity(SystemClock(), tracer), tracer=tracer,
        )  # fmt: skip

    def announce(self, version: int, **facts: Any) -> None:
        self.loader.announce(m.AnnounceVersion(version=version, lineage="l0", manifest_path=str(version), **facts))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def answered(self) -> list[int]:
        return [message.number for message in self.said if isinstance(message, m.MemoryReleased)]


@pytest.fixture
def bench(tmp_path):
    def start(scenario: Callable[[Bench], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            made = Bench(tmp_path)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(made.loader.run())
                await made.settle()
                await scenario(made)
                task.cancel()

        asyncio.run(all_of_it())

    return start


def test_a_second_release_is_carried_out_before_the_version_announced_behind_it(bench):
    async def scenario(b):
        b.announce(0)
        b.engine.may_go_on.set()
        await b.settle()
        b.engine.may_go_on.clear()
        b.loader.release(1)
        await b.settle()
        b.loader.release(2)  # the first one is under way
        b.announce(1)
        b.engine.may_go_on.set()
        await b.settle()
        assert b.answered == [1, 2]
        assert (b.engine.version, b.loader.loaded) == (1, (1, "l0")), "the controller counts on this version"
        assert isinstance(b.said[-1], m.VersionLoaded)

    bench(scenario)


def test_a_release_does_not_wait_for_the_turn_of_a_staged_version(bench):
    async def scenario(b):
        b.announce(0, is_held=True)
        await b.settle()
        assert isinstance(b.said[-1], m.VersionStaged)
        b.engine.may_go_on.set()
        b.loader.release(1)
        await b.settle()
        assert b.answered == [1]
        assert b.loader.loaded is None

    bench(scenario)


def test_after_random_orders_the_engine_is_where_the_last_one_left_it_and_every_last_release_is_answered(bench):
    async def scenario(b):
        for seed in range(300):
            rng, number, version = random.Random(seed), 1000 * seed, 0
            for _ in range(rng.randint(2, 8)):
                is_release = rng.random() < 0.5
                if is_release:
                    number += 1
                    b.loader.release(number)
                else:
                    version += 1
                    b.announce(1000 * seed + version)
                if rng.random() < 0.5:
                    b.engine.may_go_on.set()
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                b.engine.may_go_on.clear()
            b.engine.may_go_on.set()
            await b.settle()
            await b.settle()
            b.engine.may_go_on.clear()
            expected = -1 if is_release else 1000 * seed + version
            assert (seed, b.engine.version, b.engine.has_memory) == (seed, expected, not is_release)
            if number > 1000 * seed:
                assert b.answered[-1] == number, seed

    bench(scenario)
