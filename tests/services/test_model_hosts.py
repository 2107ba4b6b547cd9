"""One process holds a reward model for all scoring processes of a pool, and is started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_classifier import save_classifier

from areal_like.errors import UserError
from services.processes.framing import frame
from services.reward.classifier import Classifier
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome
from services.reward.model_wire import Item
from services.reward.pool import Pool
from services.reward.scorer_options import RewardModelOptions

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def pool_of(path: Path, **settings: Any) -> AsyncIterator[Pool]:
    scorer = {"kind": "reward_model", "options": {"path": str(path), "step_separator": ";", "reduce": "mean"}}
    pool = Pool(RewardSettings.model_validate({"scorers": [scorer], "num_spares": 0, **settings}))
    keeper = None
    try:
        await pool.start()
        keeper = asyncio.create_task(pool.run())
        yield pool
    finally:
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper}, timeout=5)
        await pool.close()


def hosts() -> set[int]:
    """Processes of models below this one."""
    found = set[int]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended has no command line
            if "services.reward.model_host" in child.cmdline():
                found.add(child.pid)
    return found


def ask(pool: Pool, number: int, response: str) -> Awaitable[Outcome]:
    row = {"prompt": "2+2? "}
    job = Job(job_id=number, scorer="", row=row, response=response, finish_reason="stop", num_tokens=3)
    return pool.attempt(frame(job), number, 60.0)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_all_scoring_processes_share_one_model_and_get_their_own_scores(model: Path) -> None:
    responses = [f"a{number};{'b' * number}" for number in range(12)]
    alone = Classifier(RewardModelOptions(path=str(model)))
    wanted = []
    for response in responses:
        begin = response[: response.index(";") + 1]
        texts = [f"2+2? {begin}", *([f"2+2? {response}"] if response != begin else [])]
        values = [scores.values[0] for scores in alone.score([Item(text=text) for text in texts])]
        wanted.append(sum(values) / len(values))

    async def work() -> None:
        async with pool_of(model, num_workers=3) as pool:
            assert len(hosts()) == 1
            gate = asyncio.Semaphore(3)

            async def one(number: int) -> Outcome:
                async with gate:
                    return await ask(pool, number, responses[number])

            outcomes = await asyncio.gather(*(one(number) for number in range(12)))
            assert [outcome.value for outcome in outcomes] == pytest.approx(wanted, abs=1e-5)
            (host,) = hosts()
            os.kill(host, signal.SIGKILL)
            for attempt in range(500):  # it loads its model meanwhile: verdicts are `crashed`, none is made up
                outcome = await ask(pool, 100 + attempt, responses[3])
                if outcome.kind == "scored":
                    break
                assert outcome.kind == "crashed"
                assert "reward model's process" in outcome.reason
                await asyncio.sleep(0.1)
            assert outcome.value == pytest.approx(wanted[3], abs=1e-5)
            assert hosts()
            assert host not in hosts()
            assert pool.counters["died_busy"] == 0
        assert not hosts()

    run(work)


def test_a_model_that_cannot_be_loaded_is_the_users_mistake(model: Path, tmp_path: Path) -> None:
    broken = save_classifier(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")

    async def work() -> None:
        with pytest.raises(UserError, match="cannot be loaded"):
            async with pool_of(broken):
                pass
        assert not hosts()

    run(work)
