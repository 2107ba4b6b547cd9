"""A race between the outputs of an SGLang server and its answer to a weight update, which leave it by two sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import psutil
import pytest
from sglang_world import TOLERANCE_NATS, World, ask, assert_whole, start_all, until

from areal_like.trajectory import Segment
from rollout.engine.port import GenerationRequest
from rollout.engine.server.answer import GrowingAnswer, MetaInfo, version_number

STEP_S = 0.004
"""The scheduler sleeps so long at each step."""
NUM_WAITING, HALT_S = 80, 5.0
"""Steps whose outputs wait in a halted front, of the 140 that an answer takes; and the longest halt, which must end
well before the adapter takes the server for a dead one.
"""
MIN_RACES, MAX_RACES = 20, 100
"""At most: where the answer to an update overtakes no output in the first ones."""


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


async def halt(front: psutil.Process) -> None:
    """Stop the front until the scheduler has slept at NUM_WAITING steps: on a busy machine these take longer."""
    (scheduler,) = [child for child in front.children() if "scheduler" in " ".join(child.cmdline())]
    slept = scheduler.num_ctx_switches().voluntary
    front.suspend()
    try:
        async with asyncio.timeout(HALT_S):
            await until(lambda: scheduler.num_ctx_switches().voluntary >= slept + NUM_WAITING)
    except TimeoutError:
        pass
    finally:
        front.resume()


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
    front, pause = psutil.Process(live.process.pid), live.client.pause
    halts = []

    async def halted_pause(how: Any) -> None:
        halts.append(asyncio.create_task(halt(front)))
        await pause(how)

    if mode == "keep_kv":
        live.client.pause = halted_pause  # type: ignore[method-assign]
    else:
        halts.append(asyncio.create_task(halt(front)))
    await world.load(before + 1, mode)
    await asyncio.gather(*halts)
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
