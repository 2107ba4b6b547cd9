"""Environment processes for real: one that hangs, lies, floods, leaks or dies costs its own episode only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.environment import Action
from areal_like.errors import UserError
from areal_like.import_check import USER_PATH
from areal_like.tool_call import ToolCall
from areal_like.wire.messages import EnvironmentReply, EnvironmentRequest, EpisodeHistory
from services.environment.config import EnvironmentSettings
from services.environment.episode_scheduler import EpisodeScheduler
from services.processes.process_tree import become_subreaper, living

pytestmark = pytest.mark.processes
LIMIT_S = 300.0


@pytest.fixture(autouse=True)
def zoo_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_PATH, str(Path(__file__).parent / "support"))


class Client:
    """Plays a rollout worker against a desk in this process."""

    def __init__(self, **settings: Any) -> None:
        self._waiting: dict[tuple[str, int], asyncio.Future[EnvironmentReply]] = {}
        self.desk = EpisodeScheduler(EnvironmentSettings(**settings), self._replied)

    def _replied(self, peer: str, reply: EnvironmentReply) -> bool:
        future = self._waiting.pop((reply.episode_id, reply.turn), None)
        if future is not None:
            future.set_result(reply)
        return True

    async def call(self, name: str, turn: int, action: Action = "", **row: Any) -> EnvironmentReply:
        future = self._waiting[name, turn] = asyncio.get_running_loop().create_future()
        history = EpisodeHistory(row=row, seed=7) if turn == 0 else None
        self.desk.offer("c", EnvironmentRequest(episode_id=name, turn=turn, action=action, history=history))
        return await future

    async def episode(self, name: str, num_turns: int = 3, **row: Any) -> list[str]:
        """Play; what was observed, or the verdict's kind and reason at the end."""
        seen = []
        for turn in range(num_turns + 1):
            reply = await self.call(name, turn, f"a{turn}", **row)
            if reply.step is None:
                return [*seen, f"{reply.status}: {reply.reason}"]
            seen.append(reply.step.observation)
        return seen


def play(scene: Callable[[Client], Awaitable[None]], kind: str = "environment_zoo:Counter", **settings: Any) -> None:
    async def whole() -> None:
        become_subreaper()
        client = Client(kind=kind, **settings)
        async with asyncio.timeout(LIMIT_S):
            try:
                await client.desk.start()
                running = asyncio.create_task(client.desk.run())
                await scene(client)
                running.cancel()
            finally:
                pids = client.desk.pool.pids
                await client.desk.close()
        assert living(pids) == set()

    asyncio.run(whole())


GOOD = ["begin 7", "7:1:a1", "7:2:a2", "7:3:a3"]


def test_whatever_one_episode_does_to_its_process_the_others_see_nothing_of_it() -> None:
    """All in one process; each misbehaves in its second step, while the good ones are in their middle."""
    expected = {
        "hang": "timed_out: the environment took longer than 0.5 s",
        "die": "crashed: the environment process ended with status 7",
        "raise": "crashed: step raised LookupError: the board is gone",
        "leave": "crashed: step raised SystemExit: 0",
        "flood": "invalid: step: its observation has 1048576 bytes, more than 65536",
        "lie": "invalid: step: its `done` is not true or false but str",
        "nan": "invalid: step: its reward is not a finite number but nan",
        "files": "crashed: the episode has 100 open files, which is more than max_episode_files 64",
        "memory": "crashed: the episode used 64 MB, which is more than max_episode_memory_mb 48",
    }

    async def scene(client: Client) -> None:
        names = [*expected, "print", *(f"good {number}" for number in range(8))]
        results = await asyncio.gather(*(client.episode(name, mode=name.split()[0]) for name in names))
        seen = dict(zip(names, results, strict=True))
        assert {name: seen[name][2:] for name in expected} == {name: [words] for name, words in expected.items()}
        assert all(seen[name] == GOOD for name in names if name.startswith("good"))
        assert seen["print"][2] == "printed"

    play(scene, step_timeout_s=0.5, retries=0, max_episode_memory_mb=48)


def test_row_whose_episodes_hang_holds_its_process_twice_and_is_quarantined_then() -> None:
    async def scene(client: Client) -> None:
        bad = [client.episode(f"bad {number}", mode="hang_at_reset") for number in range(6)]
        good = [client.episode(f"good {number}") for number in range(4)]
        results = await asyncio.gather(*bad, *good)
        assert [seen[0].partition(":")[0] for seen in results[:6]] == ["timed_out"] * 6
        assert results[6:] == [GOOD] * 4
        late = await client.call("late", 0, mode="hang_at_reset")
        assert "quarantined" in late.reason
        counters = client.desk.counters()
        assert (counters["environment.killed_overdue"], counters["environment.quarantined"]) == (2.0, 1.0)

    play(scene, num_processes=1, step_timeout_s=0.5, retries=1, max_hangs=2)


def test_async_environments_wait_together_and_fail_alone() -> None:
    expected = {
        "wait": "timed_out: step took longer than 1 s",
        "swallow": "timed_out: step took longer than 1 s",
        "block": "timed_out: the environment took longer than 1 s",
        "leave": "crashed: step raised SystemExit: 0",
    }

    async def scene(client: Client) -> None:
        names = [*expected, *(f"good {number}" for number in range(8))]
        results = await asyncio.gather(*(client.episode(name, mode=name) for name in names))
        seen = dict(zip(names, results, strict=True))
        assert {name: seen[name][1:] for name in expected} == {name: [words] for name, words in expected.items()}
        assert all(seen[name] == ["begin", "A1", "A2", "A3"] for name in names if name.startswith("good"))

    play(scene, kind="environment_zoo:Slow", step_timeout_s=1, retries=0)


def test_kill_9_of_a_process_loses_no_episode_and_its_children_end_with_it() -> None:
    async def scene(client: Client) -> None:
        await client.episode("child", 1, mode="child")
        reply = await client.call("child", 2, "a2")
        assert reply.step is not None
        child = int(reply.step.observation)
        await client.episode("good", 2)
        for pid in client.desk.pool.pids:
            os.kill(pid, signal.SIGKILL)
        reply = await client.call("good", 3, "a3")
        assert reply.step is not None
        assert reply.step.observation == "7:3:a3"
        while living({child}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    play(scene, num_processes=2)


def test_a_process_that_has_served_enough_ends_with_its_last_episode() -> None:
    async def scene(client: Client) -> None:
        async def pid_of(name: str) -> str:
            return (await client.episode(name, 2, mode="pid"))[-1]

        first, second = await pid_of("a"), await pid_of("b")
        while client.desk.pool.num_ready == 0 or client.desk.pool.counters["started"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert first == second != await pid_of("c")
        client.desk.close_episodes("c", ("a", "b"))
        while living({int(first)}):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    play(scene, recycle_after=2)


def test_an_environment_that_cannot_be_used_is_refused_before_anything_is_served() -> None:
    async def scene(client: Client) -> None:
        raise AssertionError("it started")

    with pytest.raises(UserError, match="has no method `step`"):
        play(scene, kind="environment_zoo:NoStep")


def test_tools_run_in_a_process_and_one_that_ends_it_costs_its_own_episode_only() -> None:
    """Calls cross as actions; a replay makes them again, whatever they return then."""

    async def scene(client: Client) -> None:
        first = await client.call("good", 0)
        assert first.step is not None
        assert [tool["function"]["name"] for tool in first.step.tools] == ["count", "leave"]
        await client.call("bad", 0)
        one = await client.call("good", 1, (ToolCall("count", "{}"), ToolCall("", "?", "unreadable")))
        assert one.step is not None
        assert one.step.results == ("1", "Error: the call cannot be read: unreadable")
        lost = await client.call("bad", 1, (ToolCall("leave", "{}"),))
        assert lost.status == "crashed"
        two = await client.call("good", 2, (ToolCall("count", "{}"),))
        assert two.step is not None
        assert two.step.results == ("2",)
        assert two.step.components["tool_calls"] == 3.0

    options = {"tools": ["environment_zoo:TOOLS"]}
    play(scene, kind="tools", options=options, num_processes=1, retries=0)
