"""Ten thousand mixed requests, failing scorers, workers killed at random, the service killed once: one verdict each."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from standing_harness import Standing, connected, task, until

from areal_like.verdict import Verdict

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 10_000
NUM_KILLS = 12
FAILURES: dict[str, tuple[int, str]] = {
    "raise": (170, "crashed"),
    "nan": (130, "invalid"),
    "nothing": (110, "invalid"),
    "text": (60, "invalid"),
    "segfault": (8, "crashed"),
    "os._exit": (6, "crashed"),
    "hang": (4, "timed_out"),
}
"""How often, and the verdict it must have: 5 % of all. The last three each cost the start of a process."""
SETTINGS: dict[str, Any] = {
    "scorers": [{"kind": "scorer_zoo:score"}],
    "num_workers": 2,
    "num_spares": 1,
    "timeout_s": 120.0,
    "retries": 0,
    "max_queue": 512,
    "cache_mb": 1.0,
}
GROWTH_BYTES = 24 << 20
"""Room for what a service may rightly fill: its cache, and 8,192 remembered verdicts."""


def mixture(rng: random.Random) -> list[str]:
    """What each request shall do."""
    doings = [do for do, (count, _) in FAILURES.items() for _ in range(count)]
    doings += ["length"] * (NUM_REQUESTS - len(doings))
    rng.shuffle(doings)
    return doings


def resident_bytes(service: Standing) -> int:
    return int(psutil.Process(service.process.pid).memory_info().rss)


class Storm:
    """One client with all its questions, and what is done to the service meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(7)
        self.service = Standing(folder, SETTINGS)
        self.address = self.service.address
        self.verdicts: dict[int, list[Verdict]] = {}
        self.num_killed = 0
        self.resident_bytes: list[int] = []

    @property
    def num_done(self) -> int:
        return len(self.verdicts)

    async def run(self) -> None:
        # No verdict is given up on because the machine is slow: only requests that hang have a short deadline.
        async with (
            connected([self.address], max_in_flight=512, deadline_s=120.0, total_deadline_s=500.0) as client,
            connected([self.address], run="run-b", deadline_s=1.0, total_deadline_s=500.0) as hasty,
        ):
            doings = mixture(self.rng)
            asked = [
                asyncio.create_task(self._ask(hasty if do == "hang" else client, number, do))
                for number, do in enumerate(doings)
            ]
            try:
                await self._disturb()
                await asyncio.gather(*asked)
            finally:
                for one in asked:
                    one.cancel()
            assert client.num_outstanding == hasty.num_outstanding == 0
            self.restarts = client.counters.get("reward_restarts", 0)
        self.check(doings)

    async def _ask(self, client: Any, number: int, do: str) -> None:
        # Every second honest answer is one of a hundred: exact duplicates, as groups give them.
        row = {"number": number % 100 if number % 2 else number}
        verdict = await client.score(task(do, **row), "x" * (1 + number % 50), "stop", number % 50)
        self.verdicts.setdefault(number, []).append(verdict)

    async def _disturb(self) -> None:
        """Kill workers all the time, the service itself at half time."""
        for turn in range(NUM_KILLS):
            await self._done(NUM_REQUESTS * (turn + 1) // (NUM_KILLS + 2))
            if turn == NUM_KILLS // 2:
                self.service.kill()
                self.service = await asyncio.to_thread(Standing, self.folder, SETTINGS, bind=self.address)
            else:
                self._kill_a_worker()
            self.resident_bytes.append(resident_bytes(self.service))

    async def _done(self, count: int) -> None:
        while self.num_done < count:  # noqa: ASYNC110  (several tasks count)
            await asyncio.sleep(0.005)

    def _kill_a_worker(self) -> None:
        children = psutil.Process(self.service.process.pid).children()
        if children:
            try:
                os.kill(self.rng.choice(children).pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # it died by itself meanwhile
            self.num_killed += 1

    def check(self, doings: list[str]) -> None:
        assert sorted(self.verdicts) == list(range(NUM_REQUESTS)), "each has one"
        assert all(len(found) == 1 for found in self.verdicts.values()), "and only one"
        wrong: Counter[str] = Counter()
        for number, do in enumerate(doings):
            verdict = self.verdicts[number][0]
            expected = FAILURES[do][1] if do in FAILURES else "scored"
            if verdict.kind != expected:
                wrong[f"{do}: {verdict.kind} {verdict.reason}"] += 1
            elif expected == "scored":
                assert verdict.value == float(1 + number % 50)
        assert all(": crashed the scoring process was killed by signal SIGKILL" in one for one in wrong), wrong
        assert wrong.total() <= self.num_killed, "a killed worker costs the request it was at, no more"


@pytest.mark.thorough
def test_every_request_has_one_verdict_through_kills_and_a_restart_and_memory_stays_flat(tmp_path: Path) -> None:
    storm = Storm(tmp_path)
    try:
        asyncio.run(storm.run())
        assert storm.restarts == 1
        assert storm.num_killed >= NUM_KILLS // 2
        second_life = storm.resident_bytes[NUM_KILLS // 2 + 1 :]
        assert max(second_life) - second_life[0] < GROWTH_BYTES, storm.resident_bytes
        asyncio.run(_settled(storm.service))
        storm.service.process.terminate()
        assert storm.service.process.wait(300.0) == 0, storm.service.log[-3000:]
    finally:
        storm.service.close()


async def _settled(service: Standing) -> None:
    """The pool is at full strength again, and nothing else is left of what was killed."""
    own = psutil.Process(service.process.pid)
    await until(lambda: len(own.children(recursive=True)) == SETTINGS["num_workers"] + SETTINGS["num_spares"])
