"""The adapter and the real SGLang server when its front halts, a stranger calls it, or it is killed; on a CPU.

One server serves all tests of this file.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from sglang_world import TOLERANCE_NATS, World, ask, assert_whole, start_all, until

from areal_like.guard import RECORD, SHM
from areal_like.trajectory import Segment
from rollout.engine.port import GenerationRequest
from rollout.engine.sglang.answer import GrowingAnswer, MetaInfo, version_number

pytestmark = pytest.mark.e2e

NUM_RACES = 20
HALT_S, STEP_S = 0.4, 0.004
"""A halt of the front, and the scheduler's time for a token meanwhile."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("sglang"), num_versions=8)
    yield from made.started()


class Names:
    """Counts tokens that the front passed on under another version's name than the spans give them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_wrong = 0
        self._names: dict[GrowingAnswer, list[int]] = {}
        for name in ("begin_attempt", "_stamp", "_settle"):
            monkeypatch.setattr(GrowingAnswer, name, self._watched(getattr(GrowingAnswer, name), getattr(self, name)))

    @staticmethod
    def _watched(original: Any, look: Any) -> Any:
        def watched(answer: GrowingAnswer, *words: Any) -> None:
            original(answer, *words)
            look(answer, *words)

        return watched

    def begin_attempt(self, answer: GrowingAnswer, _: int) -> None:
        self._names[answer] = []

    def _stamp(self, answer: GrowingAnswer, meta: MetaInfo, count: int) -> None:
        self._names[answer] += [version_number(meta.weight_version)] * count

    def _settle(self, answer: GrowingAnswer, _: MetaInfo) -> None:
        names = np.array(self._names[answer])
        self.num_wrong += int((names != answer.segment.versions_R[len(answer) - len(names) :]).sum())


async def race(world: World, number: int, mode: str) -> list[tuple[GenerationRequest, Segment]]:
    """Halt the front at a swap, so that outputs and the update's answer wait in it together; then cut half of the
    answers off. All that was shown of those, and at some moment of the others.
    """
    before = 2 * (number % 4)
    await world.load(before)
    await world.slow(STEP_S)
    requests = [ask(1000 * (number + 1) + n, max_new_tokens=140) for n in range(8)]
    tasks = await start_all(world, requests)
    live = await world.engine._keeper.ready()
    assert live.process is not None
    front, loop, pause = live.process.pid, asyncio.get_running_loop(), live.client.pause

    async def halted_pause(how: Any) -> None:
        os.kill(front, signal.SIGSTOP)
        loop.call_later(HALT_S, os.kill, front, signal.SIGCONT)
        await pause(how)

    if mode == "keep_kv":
        live.client.pause = halted_pause  # type: ignore[method-assign]
    else:
        os.kill(front, signal.SIGSTOP)
        loop.call_later(HALT_S, os.kill, front, signal.SIGCONT)
    await world.load(before + 1, mode)
    live.client.pause = pause  # type: ignore[method-assign]
    await asyncio.sleep(0.005 * number)
    shown = world.engine.progress()
    found = [(request, shown[request.request_id]) for request in requests if request.request_id in shown]
    for task in tasks[::2]:
        task.cancel()
    await world.slow(None)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for request, outcome in list(zip(requests, outcomes, strict=True))[1::2]:
        assert not isinstance(outcome, BaseException), outcome
        assert_whole(request, outcome, 140)
        if mode == "recompute":
            found.append((request, outcome.segment))
        else:
            versions, counts = np.unique(outcome.segment.versions_R, return_counts=True)
            spans = list(zip(versions.tolist(), counts.tolist(), strict=True))
            tokens = np.concatenate((request.prompt_P, outcome.segment.tokens_R))
            said = world.kept_logprobs(spans, tokens, len(request.prompt_P), request.sampling.temperature)
            assert np.abs(said - outcome.segment.logprobs_R).max() <= TOLERANCE_NATS
    return found


def test_outputs_that_wait_in_a_halted_front_are_never_stamped_with_the_next_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch)

    async def body() -> None:
        num_tokens = 0
        for number in range(NUM_RACES):
            for request, segment in await race(world, number, "recompute" if number % 2 else "keep_kv"):
                num_tokens += len(segment)
                assert not len(segment) or world.error_nats(request, segment) <= TOLERANCE_NATS
        assert num_tokens > 20 * NUM_RACES
        assert names.num_wrong > 0, "no output was overtaken by the answer to an update"
        print(f"{num_tokens} tokens shown, all right; {names.num_wrong} were passed on under a wrong name")

    world.run(body)


OPEN_ROUTES = ("/health", "/ready", "/metrics")
"""SGLang wants no key for these."""


def test_a_stranger_reaches_no_route_of_the_server(world: World) -> None:
    async def body() -> None:
        live = await world.engine._keeper.ready()
        key = live.client._session.headers["Authorization"]
        for process in psutil.Process().children(recursive=True):
            assert key.removeprefix("Bearer ") not in " ".join(process.cmdline())
        async with live.client._session.get(f"{live.client.url}/openapi.json") as response:
            assert response.status == 200
            paths = (await response.json())["paths"]
        assert {"/generate", "/update_weights_from_disk", "/abort_request", "/server_info"} <= paths.keys()
        async with aiohttp.ClientSession() as stranger:
            for path, methods in paths.items():
                if path.startswith(OPEN_ROUTES):
                    continue
                for method in methods:
                    async with stranger.request(method, live.client.url + path.replace("{", "").replace("}", "")) as r:
                        assert r.status == 401, f"{method} {path} answers a stranger with {r.status}"
        await live.client.probe()
        assert (await world.engine._keeper.ready()) is live

    world.run(body)


def test_a_killed_server_leaves_nothing_in_shared_memory_and_no_wrong_stamp(world: World) -> None:
    async def body() -> None:
        await world.load(2)
        await world.slow(0.02)
        requests = [ask(n, max_new_tokens=140) for n in range(8)]
        tasks = await start_all(world, requests)
        keeper = world.engine._keeper
        live = await keeper.ready()
        assert live.process is not None
        record = keeper.scratch / RECORD
        await until(record.exists)
        left = [Path(SHM, line.split(" ")[0]) for line in record.read_text().splitlines()]
        assert any(path.name.startswith("sglang_loads_") for path in left)
        await world.load(3, "keep_kv")
        os.kill(live.process.pid, signal.SIGKILL)
        await until(lambda: keeper.live is not live)
        for request, outcome in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_whole(request, outcome, 140)
            assert world.error_nats(request, outcome.segment) <= TOLERANCE_NATS
        assert world.engine.counters()["server_restarts"] == 1
        assert [path for path in left if path.exists()] == []

    world.run(body)
