"""A pool whose scoring processes are puppets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.processes import process_tree
from services.processes.child_process import Died
from services.reward import pool as module
from services.reward.config import RewardSettings
from services.reward.job import Outcome, Ready
from services.reward.pool import Pool

LIMIT_S = 300.0


class Puppet:
    """A scoring process that does what the stage's scripts say."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.pid = next(stage.numbers)
        self.num_scored = 0
        self.killed_because = ""
        self.is_alive = True
        self.was_killed = False
        self.children: set[int] = set()

    async def prepare(self, setup: Any, timeout_s: float) -> Ready:
        self.stage.num_starts += 1
        if error := self.stage.start_error(self.stage.num_starts):
            self.is_alive = False
            raise error
        await self.stage.gate.wait()
        return Ready(names=["a"], label="a@1", volatile=["a"])

    async def score(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        outcome = await self.stage.score(self, job_id, limit_s)
        self.num_scored += 1
        return outcome

    def leftover_processes(self) -> set[int]:
        return self.children

    def check(self) -> bool:
        return self.is_alive

    async def kill(self) -> None:
        self.kill_now()

    def kill_now(self) -> None:
        self.is_alive, self.was_killed = False, True


class Stage:
    """A pool of puppets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.numbers = itertools.count(1000)
        self.puppets: list[Puppet] = []
        self.num_starts = 0
        self.start_error: Callable[[int], Exception | None] = lambda number: None
        self.score: Callable[[Puppet, int, float], Coroutine[Any, Any, Outcome]] = right
        self.held: dict[int, int] = {}
        """Bytes of memory by process id."""
        self.orphan_sweeps: list[set[int]] = []
        self.tree_kills: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        monkeypatch.setattr(module, "ScoringProcess", self)
        monkeypatch.setattr(module, "WATCH_S", 0.0)
        monkeypatch.setattr(module, "children_of", lambda pid: [7])
        monkeypatch.setattr(process_tree, "kill_orphans", self._sweep)
        monkeypatch.setattr(process_tree, "kill_tree_now", self.tree_kills.append)
        monkeypatch.setattr(process_tree, "tree_holds_more_than", self._held)
        self.pool = Pool(RewardSettings.model_validate({"num_workers": 2, "num_spares": 1, **settings}))

    def spawn(self, output_log: Any) -> Puppet:
        self.puppets.append(Puppet(self))
        return self.puppets[-1]

    async def _sweep(self, known: Any) -> int:
        self.orphan_sweeps.append(set(known))
        return 0

    def _held(self, pid: int, max_bytes: int) -> int:
        held = self.held.get(pid, 0)
        return held if held > max_bytes else 0

    @property
    def living(self) -> list[Puppet]:
        return [puppet for puppet in self.puppets if puppet.is_alive]

    async def until(self, is_true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():  # noqa: ASYNC110  (turns of the loop, no time)
                await asyncio.sleep(0)

    async def full(self, number: int = 3) -> None:
        await self.until(lambda: self.pool.num_ready == number)


async def right(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
    return Outcome(job_id=job_id, kind="scored", value=1.0)


def raises(error: Exception) -> Callable[[Puppet, int, float], Coroutine[Any, Any, Outcome]]:
    async def score(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
        if isinstance(error, Died):
            puppet.is_alive = False
        raise error

    return score


def play(
    monkeypatch: pytest.MonkeyPatch, scene: Callable[[Stage], Coroutine[Any, Any, None]], **settings: Any
) -> Stage:
    """The scene with a pool that is started and full; closed afterwards."""

    async def run() -> Stage:
        stage = Stage(monkeypatch, **settings)
        await stage.pool.start()
        keeper = asyncio.create_task(stage.pool.run())
        try:
            await stage.full(stage.pool._target)
            async with asyncio.timeout(LIMIT_S):
                await scene(stage)
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})
            await stage.pool.close()
        return stage

    return asyncio.run(run())
