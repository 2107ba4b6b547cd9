"""What a pool of scoring processes begins and ends besides them, and what it forgets of a process that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from pool_stage import Puppet, Stage, play, right

from areal_like.errors import UserError
from services.reward import pool as module
from services.reward.config import RewardSettings
from services.reward.job import Outcome, Ready
from services.reward.pool import START_TIMEOUT_S


def run(monkeypatch: pytest.MonkeyPatch, scene: Any, **settings: Any) -> None:
    """The scene with a pool that nobody has started."""

    async def whole() -> None:
        async with asyncio.timeout(20.0):
            await scene(Stage(monkeypatch, **settings))

    asyncio.run(whole())


def test_hosts_of_models_begin_before_the_scorers_and_end_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Hosts:
        pids = frozenset({5})

        def __init__(self, settings: RewardSettings) -> None:
            self.settings = settings

        async def start(self) -> None:
            done.append("start")

        async def run(self) -> None:
            done.append("run")

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr(module, "ModelHosts", Hosts)

    async def scene(stage: Stage) -> None:
        assert done == ["start", "run"]
        assert 5 in stage.pool.pids

    play(monkeypatch, scene)
    assert done == ["start", "run", "close"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_only_a_slow_first_load_is_reported(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(module, "SLOW_START_S", 0.0)
    monkeypatch.setattr(module, "print_slow", lambda *words: said.append(words))
    loads_at_once = Puppet.prepare

    async def prepare(puppet: Puppet, setup: Any, timeout_s: float) -> Ready:
        if is_slow:
            await puppet.stage.until(lambda: said)
        return await loads_at_once(puppet, setup, timeout_s)

    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(Puppet, "prepare", prepare)
        await stage.pool.start()
        await asyncio.sleep(0.01)

    run(monkeypatch, scene, scorers=[{"kind": "math"}, {"kind": "running_sum"}])
    assert said == [("loading reward scorer math, running_sum", 0.0, START_TIMEOUT_S)] * is_slow


def test_first_process_whose_scorers_are_refused_is_ended_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        stage.start_error = lambda number: UserError("no such column")
        with pytest.raises(UserError, match="no such column"):
            await stage.pool.start()
        assert stage.puppets[0].was_killed
        assert stage.pool.pids == frozenset()
        assert stage.orphan_sweeps == [{7}]

    run(monkeypatch, scene)


def test_start_that_is_cancelled_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        stage.gate.clear()
        starting = asyncio.create_task(stage.pool.start())
        await stage.until(lambda: stage.num_starts == 1)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        assert stage.puppets[0].was_killed
        assert stage.pool.pids == frozenset()

    run(monkeypatch, scene)


def test_process_of_a_cancelled_attempt_is_forgotten_and_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(puppet: Puppet, job_id: int, limit_s: float) -> Coroutine[Any, Any, Outcome]:
        async def score() -> Outcome:
            await asyncio.Event().wait()
            return await right(puppet, job_id, limit_s)

        return score()

    async def scene(stage: Stage) -> None:
        stage.score = endless
        await stage.pool.start()
        attempt = asyncio.create_task(stage.pool.attempt(b"", 1, 9.0))
        await stage.until(lambda: stage.pool.num_busy == 1)
        stage.pool._lost.clear()
        attempt.cancel()
        await asyncio.wait({attempt})
        assert stage.puppets[0].was_killed
        assert (stage.pool.pids, stage.pool.num_ready) == (frozenset(), 0)
        assert stage.pool._lost.is_set(), "a successor is to be started"

    run(monkeypatch, scene)


def test_closed_pool_has_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        await stage.pool.start()
        assert (len(stage.pool.pids), stage.pool.num_ready) == (1, 1)
        await stage.pool.close()
        assert stage.puppets[0].was_killed
        assert (stage.pool.pids, stage.pool.num_ready) == (frozenset(), 0)

    run(monkeypatch, scene)
