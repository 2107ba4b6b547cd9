"""Claims about the pool, with puppets for its processes: who is used, who must go, who comes after, what is said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pool_stage import LIMIT_S, Puppet, Stage, play, raises, right

from areal_like.errors import OperationError, UserError
from services.processes.child_process import Died
from services.reward import pool as module
from services.reward.config import RewardSettings
from services.reward.job import Outcome
from services.reward.pool import MAX_FAILED_STARTS
from services.reward.process_handle import Overdue


@pytest.mark.parametrize("is_shared", [True, False])
def test_scoring_processes_know_whether_runs_share_them(is_shared: bool) -> None:
    assert module.Pool(RewardSettings(), is_shared=is_shared)._setup.is_shared is is_shared


# ---------------------------------------------------------------- filling


def test_pool_is_filled_up_to_workers_and_spares_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(stage.living) == 3
        assert stage.pool.num_busy == 0
        assert stage.pool.counters["started"] == 3

    stage = play(monkeypatch, scene)
    assert (stage.pool.names, stage.pool.label, stage.pool.volatile) == (["a"], "a@1", ["a"])
    assert not stage.living, "close ends every process"
    assert stage.orphan_sweeps[-1] == {7}, "close leaves the children alone that were there before the pool"


def test_first_process_alone_loads_the_scorers_before_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake of the user's must show once, not in every process."""

    async def run() -> None:
        stage = Stage(monkeypatch)
        await stage.pool.start()
        assert len(stage.puppets) == 1
        await stage.pool.close()

    asyncio.run(run())


def test_a_first_process_that_is_killed_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        errors = [Died("the scoring process was killed by signal SIGKILL", is_killed=True)]
        stage.start_error = lambda number: errors.pop() if errors else None
        await stage.pool.start()
        assert errors == []
        assert stage.pool.num_ready == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "kinds", "words", "remedy"),
    [
        (UserError("no such column"), ["math"], "no such column", ""),
        (Died("it was killed by signal SIGSEGV"), ["math"], "cannot be loaded: it was killed by signal SIGSEGV", ""),
        (
            Died("took longer"),
            ["my.module:fn"],
            "the scorer cannot be loaded: took longer",
            "check the code that runs when the module of the scorer is imported",
        ),
    ],
)
def test_scorer_that_cannot_be_loaded_is_the_users_mistake(
    error: Exception, kinds: list[str], words: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> Stage:
        stage = Stage(monkeypatch, scorers=[{"kind": kind} for kind in kinds])
        stage.start_error = lambda number: error
        with pytest.raises(UserError, match=words) as raised:
            await stage.pool.start()
        assert remedy in raised.value.remedy
        assert bool(raised.value.remedy) == bool(remedy)
        await stage.pool.close()
        return stage

    assert asyncio.run(run()).num_starts == 1


def test_failed_start_is_tried_again_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            waits.append(seconds)
        await sleep(0)

    async def scene(stage: Stage) -> None:
        already = stage.num_starts
        stage.start_error = lambda number: Died("not now") if number <= already + 3 else None
        monkeypatch.setattr(module.asyncio, "sleep", note)
        stage.living[0].is_alive = False
        await stage.until(lambda: stage.num_starts == already + 4 and stage.pool.num_ready == 3)
        assert stage.pool.counters["failed_starts"] == 3
        assert stage.pool._num_failed_starts == 0, "a success ends the row of failures"

    play(monkeypatch, scene)
    assert waits == [0.2, 0.4, 0.8], "each failed start doubles the pause before the next"


def test_so_many_failed_starts_in_a_row_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    waits: list[float] = []

    async def quick(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    async def run() -> int:
        stage = Stage(monkeypatch, num_spares=0, num_workers=2)
        await stage.pool.start()
        monkeypatch.setattr(module.asyncio, "sleep", quick)
        stage.start_error = lambda number: Died("no memory") if number > 1 else None
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(BaseExceptionGroup) as raised:
                await stage.pool.run()
        (error,) = raised.value.exceptions
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        assert isinstance(error, OperationError)
        assert "can no longer be started: no memory" in str(error)
        await stage.pool.close()
        return stage.num_starts

    assert asyncio.run(run()) == 1 + MAX_FAILED_STARTS
    assert max(waits) <= 5.0


# ---------------------------------------------------------------- attempts


def test_answer_comes_through_and_the_process_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        seen: list[tuple[int, float, int]] = []

        async def score(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            seen.append((job_id, limit_s, stage.pool.num_busy))
            return await right(puppet, job_id, limit_s)

        stage.score = score
        for number in range(7):
            outcome = await stage.pool.attempt(b"", number, 5.0)
            assert outcome == Outcome(job_id=number, kind="scored", value=1.0)
        assert seen == [(number, 5.0, 1) for number in range(7)]
        assert sorted(puppet.num_scored for puppet in stage.puppets) == [2, 2, 3], "in turn"
        assert stage.pool.num_busy == 0

    play(monkeypatch, scene)


@pytest.mark.parametrize(
    ("error", "kind", "reason", "counter"),
    [
        (Overdue("slow"), "timed_out", "slow took longer than 5 s", "killed_overdue"),
        (Overdue(""), "timed_out", "the scoring process took longer than 5 s", "killed_overdue"),
        (Died("killed by SIGKILL", "bad"), "crashed", "killed by SIGKILL in bad", "died_busy"),
        (Died("killed by SIGKILL"), "crashed", "killed by SIGKILL", "died_busy"),
    ],
)
def test_process_that_fails_is_replaced_and_the_verdict_says_in_which_scorer(
    error: Any, kind: str, reason: str, counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        stage.score = raises(error)
        outcome = await stage.pool.attempt(b"", 1, 5.0)
        assert (outcome.job_id, outcome.kind, outcome.reason, outcome.scorer) == (1, kind, reason, error.scorer)
        assert outcome.scorer_s.keys() == ({error.scorer} if error.scorer else set())
        assert all(0 <= seconds < LIMIT_S for seconds in outcome.scorer_s.values())
        assert stage.pool.counters[counter] == 1
        await stage.full()
        assert len(stage.puppets) == 4
        (dead,) = [puppet for puppet in stage.puppets if not puppet.is_alive]
        assert dead.was_killed, "with its whole tree"
        assert dead.pid not in stage.orphan_sweeps[-1]
        assert {7} < stage.orphan_sweeps[-1], "neither other processes of the pool nor older children are orphans"

    play(monkeypatch, scene)


def test_cancelled_attempt_ends_the_process_so_that_its_answer_goes_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        async def hang(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            await asyncio.sleep(LIMIT_S)
            raise AssertionError

        stage.score = hang
        attempt = asyncio.create_task(stage.pool.attempt(b"", 1, 5.0))
        await stage.until(lambda: stage.pool.num_busy == 1)
        attempt.cancel()
        await asyncio.wait({attempt})
        assert attempt.cancelled()
        assert stage.puppets[0].was_killed
        assert stage.pool.num_busy == 0
        await stage.full()
        assert stage.puppets[0] not in stage.pool._idle

    play(monkeypatch, scene)


def test_attempt_waits_for_a_process_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        free = asyncio.Event()

        async def hold(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            await free.wait()
            return await right(puppet, job_id, limit_s)

        stage.score = hold
        attempts = [asyncio.create_task(stage.pool.attempt(b"", number, 5.0)) for number in range(5)]
        await stage.until(lambda: stage.pool.num_busy == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stage.pool.num_busy == 3
        free.set()
        assert [outcome.job_id for outcome in await asyncio.gather(*attempts)] == [0, 1, 2, 3, 4]
        assert len(stage.puppets) == 3

    play(monkeypatch, scene)


def test_process_found_dead_when_its_turn_comes_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        stage = Stage(monkeypatch)
        await stage.pool.start()
        await stage.pool._start_one()
        first, second = stage.puppets
        first.is_alive = False
        outcome = await stage.pool.attempt(b"", 1, 5.0)
        assert outcome.kind == "scored"
        assert (first.num_scored, second.num_scored) == (0, 1)
        assert stage.pool.counters["died_idle"] == 1
        assert first.was_killed
        await stage.pool.close()

    asyncio.run(run())


def test_process_is_replaced_after_so_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        for number in range(3):
            await stage.pool.attempt(b"", number, 5.0)
        assert stage.pool.counters["recycled"] == 0
        await stage.pool.attempt(b"", 3, 5.0)
        assert stage.pool.counters["recycled"] == 1
        assert [puppet.num_scored for puppet in stage.puppets if puppet.was_killed] == [2]
        await stage.full()

    play(monkeypatch, scene, recycle_after=2)


def test_process_that_left_children_is_replaced_and_its_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        stage.puppets[0].children = {99}
        outcome = await stage.pool.attempt(b"", 1, 5.0)
        assert outcome.kind == "scored"
        assert stage.pool.counters["left_children"] == 1
        assert stage.puppets[0].was_killed
        assert len(stage.living) >= 2

    play(monkeypatch, scene)


@pytest.mark.parametrize("how", ["died", "condemned"])
def test_process_that_ends_with_its_answer_given_is_not_used_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        async def last_one(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            if how == "died":
                puppet.is_alive = False
            else:
                puppet.killed_because = "too much memory"
            return await right(puppet, job_id, limit_s)

        stage.score = last_one
        assert (await stage.pool.attempt(b"", 1, 5.0)).kind == "scored"
        assert stage.puppets[0].was_killed
        assert stage.puppets[0] not in stage.pool._idle

    play(monkeypatch, scene)


# ---------------------------------------------------------------- the watch


def test_process_that_dies_idle_is_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        victim = stage.puppets[1]
        victim.is_alive = False
        await stage.until(lambda: victim.was_killed and stage.pool.num_ready == 3)
        assert stage.pool.counters["died_idle"] == 1
        assert victim not in stage.pool._idle

    play(monkeypatch, scene)


def test_death_of_a_busy_process_is_its_attempts_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        async def die(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            puppet.is_alive = False
            for _ in range(50):
                await asyncio.sleep(0)
            raise Died("gone")

        stage.score = die
        assert (await stage.pool.attempt(b"", 1, 5.0)).kind == "crashed"
        assert stage.pool.counters["died_idle"] == 0
        assert stage.pool.counters["died_busy"] == 1

    play(monkeypatch, scene)


def test_idle_process_that_holds_too_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        small, large, _ = stage.puppets
        stage.held = {small.pid: 10 << 20, large.pid: (10 << 20) + 1}
        await stage.until(lambda: large.was_killed and stage.pool.num_ready == 3)
        assert not small.was_killed
        assert stage.pool.counters["killed_memory"] == 1
        assert large.killed_because == "the scoring process used 10 MB, which is more than max_memory_mb 10"

    play(monkeypatch, scene, max_memory_mb=10)


def test_busy_process_that_holds_too_much_memory_is_killed_once_and_its_exchange_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        async def grow(puppet: Puppet, job_id: int, limit_s: float) -> Outcome:
            stage.held[puppet.pid] = 11 << 20
            await stage.until(lambda: puppet.killed_because)
            for _ in range(50):
                await asyncio.sleep(0)
            puppet.is_alive = False
            raise Died(puppet.killed_because)

        stage.score = grow
        outcome = await stage.pool.attempt(b"", 1, 5.0)
        assert outcome.reason == "the scoring process used 11 MB, which is more than max_memory_mb 10"
        assert stage.tree_kills == [stage.puppets[0].pid]
        assert stage.pool.counters["killed_memory"] == 1

    play(monkeypatch, scene, max_memory_mb=10)
