"""The loops of the environment pool: starting, replacing, recycling and watching processes that the test plays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from made_host import FakeHost

from areal_like.errors import UserError
from services.environment import pool as module
from services.environment.config import EnvironmentSettings
from services.environment.job import HostSetup
from services.environment.marker import NOBODY
from services.environment.pool import MAX_FAILED_STARTS, START_TIMEOUT_S, HostPool
from services.processes.child_process import Died, OutputLog


class PlayedHost(FakeHost):
    """A process that loads at once, or fails as the stage says, and runs until it is ended."""

    def __init__(self, stage: Stage, pid: int) -> None:
        super().__init__(pid, num_episodes=0)
        self.stage, self.done = stage, [""]
        self.waiting = set()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def prepare(self, setup: HostSetup, timeout_s: float) -> None:
        assert (setup.service_pid, timeout_s) == (os.getpid(), START_TIMEOUT_S)
        assert setup.settings == self.stage.settings.model_dump(mode="json")
        if self.stage.failures:
            raise self.stage.failures.pop(0)

    async def run(self, on_message: Callable[[Any], None]) -> str:
        self.say = on_message
        return await self.gone

    def check(self) -> bool:
        return not self.gone.done()

    async def kill(self) -> None:
        self.stage.done.append(("kill", self.pid))

    def kill_now(self) -> None:
        self.stage.done.append(("kill now", self.pid))

    def close_marker(self) -> None:
        self.stage.done.append(("close", self.pid))


class Stage:
    """A pool whose processes are played; what becomes of them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.settings = EnvironmentSettings(kind="guess_number", **settings)
        self.hosts: dict[int, PlayedHost] = {}
        self.failures: list[Exception] = []
        self.done: list[Any] = []
        self.num_ready_calls = 0
        self.slept_s: list[float] = []
        monkeypatch.setattr(module, "HostProcess", SimpleNamespace(start=self.start))
        monkeypatch.setattr(module, "children_of", lambda pid: [1] if pid == os.getpid() else [])
        monkeypatch.setattr(
            module, "process_tree",
            SimpleNamespace(kill_tree_now=self.end, kill_orphans=self.sweep, tree_holds_more_than=lambda pid, limit: 0),
        )  # fmt: skip
        self.pool = HostPool(
            self.settings, lambda host, message: self.done.append(("said", host.pid, message)),
            lambda host, reason: self.done.append(("lost", host.pid, reason)), self.ready, lambda: frozenset({2}),
        )  # fmt: skip

    def start(self, output_log: OutputLog) -> PlayedHost:
        host = PlayedHost(self, 10 + len(self.hosts))
        self.hosts[host.pid] = host
        return host

    def ready(self) -> None:
        self.num_ready_calls += 1

    def end(self, pid: int) -> None:
        self.hosts[pid].gone.set_result(self.hosts[pid].killed_because)

    async def sweep(self, known: frozenset[int]) -> None:
        self.done.append(("sweep", set(known)))

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():  # noqa: ASYNC110  (the pool's own loops bring it about)
            await asyncio.sleep(0)


def perform(
    monkeypatch: pytest.MonkeyPatch, scene: Callable[[Stage], Coroutine[Any, Any, None]], **settings: Any
) -> Stage:
    """The scene while the pool runs."""

    async def whole() -> Stage:
        stage = Stage(monkeypatch, **settings)
        async with asyncio.timeout(300.0):
            await stage.pool.start()
            running = asyncio.create_task(stage.pool.run())
            try:
                await scene(stage)
            finally:
                running.cancel()
                await asyncio.wait({running})
                if not running.cancelled():
                    stage.done.append(running.exception())
        return stage

    return asyncio.run(whole())


def test_one_process_loads_first_and_then_as_many_run_as_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        assert list(stage.hosts) == [10]
        await stage.until(lambda: stage.pool.num_ready == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stage.pool.pids == {10, 11, 12}
        assert stage.num_ready_calls == 3, "who waits for a process learns of each"
        assert stage.pool.counters == {"started": 3}

    perform(monkeypatch, scene, num_processes=3)


@pytest.mark.parametrize("times", [1, 2])
def test_a_first_process_that_is_killed_is_started_once_more(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, or by an operator: it says nothing about the environment."""

    async def scene() -> None:
        stage = Stage(monkeypatch)
        stage.failures = [Died("the environment process was killed by signal SIGKILL", is_killed=True)] * times
        if times == 1:
            await stage.pool.start()
            assert stage.pool.num_ready == 1
        else:
            with pytest.raises(UserError, match="was killed by signal SIGKILL"):
                await stage.pool.start()

    asyncio.run(scene())


def test_environment_that_cannot_be_loaded_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        stage = Stage(monkeypatch)
        stage.failures = [Died("it ended with status 3")]
        with pytest.raises(UserError, match="guess_number cannot be loaded: it ended with status 3") as raised:
            await stage.pool.start()
        assert raised.value.where == "reward.environment.kind"
        assert stage.done == [("kill now", 10), ("close", 10)]
        assert stage.pool.pids == frozenset()

    asyncio.run(scene())


@pytest.mark.parametrize("is_slow", [False, True])
def test_only_a_slow_first_load_is_reported(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(module, "SLOW_START_S", 0.0)
    monkeypatch.setattr(module, "print_slow", lambda *words: said.append(words))

    async def scene() -> None:
        stage = Stage(monkeypatch)
        loads_at_once = PlayedHost.prepare

        async def prepare(host: PlayedHost, setup: HostSetup, timeout_s: float) -> None:
            await loads_at_once(host, setup, timeout_s)
            if is_slow:
                await stage.until(lambda: bool(said))

        monkeypatch.setattr(PlayedHost, "prepare", prepare)
        await stage.pool.start()
        await asyncio.sleep(0.01)

    asyncio.run(scene())
    assert said == [("loading environment guess_number", 0.0, START_TIMEOUT_S)] * is_slow


def test_what_a_process_says_is_passed_on_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: all(hasattr(host, "say") for host in stage.hosts.values()) and len(stage.hosts) == 2)
        stage.hosts[11].say("words")
        assert stage.done == [("said", 11, "words")]

    perform(monkeypatch, scene, num_processes=2)


def test_process_that_dies_is_reported_with_the_episode_whose_code_ran_replaced_and_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)
        host = stage.hosts[10]
        host.mark = host.mark._replace(episode=4)
        host.gone.set_result("killed by signal SIGSEGV")
        await stage.until(lambda: stage.pool.pids == {11} and len(stage.done) == 4)
        assert host.culprit == 4
        assert stage.done == [
            ("lost", 10, "killed by signal SIGSEGV"), ("kill", 10), ("close", 10),
            ("sweep", {1, 2} | stage.done[3][1] - {10}),
        ]  # fmt: skip
        assert stage.pool.counters == {"started": 2, "died": 1}
        assert stage.pool.pids == {11}

    perform(monkeypatch, scene, num_processes=1)


def test_processes_that_are_being_started_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loads_at_once = PlayedHost.prepare

    async def scene(stage: Stage) -> None:
        gate = asyncio.Event()

        async def prepare(host: PlayedHost, setup: HostSetup, timeout_s: float) -> None:
            await gate.wait()
            await loads_at_once(host, setup, timeout_s)

        monkeypatch.setattr(PlayedHost, "prepare", prepare)
        for _ in range(3):
            await stage.until(lambda: len(stage.hosts) >= 3 and not stage.pool._lost.is_set())
            stage.pool._lost.set()
        gate.set()
        await stage.until(lambda: stage.pool.num_ready >= 3)
        assert set(stage.hosts) == {10, 11, 12}

    perform(monkeypatch, scene, num_processes=3)


def test_successor_starts_while_the_tree_of_the_lost_one_is_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)

        async def kill() -> None:
            assert stage.pool._num_dying == 1
            await stage.until(lambda: stage.pool.num_ready == 1)

        monkeypatch.setattr(stage.hosts[10], "kill", kill)
        stage.hosts[10].gone.set_result("gone")
        await stage.until(lambda: stage.pool.pids == {11})
        assert stage.pool._num_dying == 0

    perform(monkeypatch, scene, num_processes=1)


def test_successor_waits_for_the_end_of_the_lost_one_where_a_retired_one_takes_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)
        stage.hosts[10].episodes, stage.hosts[10].num_begun = {1}, 1
        stage.pool.look_after(stage.hosts[10])  # type: ignore[arg-type]
        await stage.until(lambda: stage.pool.num_ready == 1)

        async def kill() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            assert set(stage.hosts) == {10, 11}, "two live already"

        monkeypatch.setattr(stage.hosts[11], "kill", kill)
        stage.hosts[11].gone.set_result("gone")
        await stage.until(lambda: 12 in stage.hosts and stage.pool.num_ready == 1)
        assert stage.pool.pids == {10, 12}

    perform(monkeypatch, scene, num_processes=1, recycle_after=1)


@pytest.mark.parametrize(
    ("killed_because", "episodes", "is_logged"),
    [("", set(), True), ("", {1}, True), ("it is stuck", set(), False), ("it is stuck", {1}, True)],
)
def test_only_the_end_of_an_idle_process_that_was_to_end_goes_unsaid(
    killed_because: str, episodes: set[int], is_logged: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)
        host = stage.hosts[10]
        host.episodes, host.killed_because = set(episodes), killed_because
        host.gone.set_result("gone")
        await stage.until(lambda: stage.pool.pids == {11})

    perform(monkeypatch, scene, num_processes=1)
    words = f"environment process 10 ended (gone) while running {len(episodes)} episodes"
    assert (words in caplog.messages) == is_logged


def test_process_that_was_killed_for_nobody_stays_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)
        host = stage.hosts[10]
        host.mark = host.mark._replace(episode=4)
        stage.pool.blame(host, NOBODY, "crashed", "it is stuck")  # type: ignore[arg-type]
        await stage.until(lambda: stage.pool.pids == {11})
        assert host.culprit == NOBODY
        assert stage.pool.counters["died"] == 0
        assert ("lost", 10, "it is stuck") in stage.done

    perform(monkeypatch, scene, num_processes=1)


def test_retired_process_ends_once_its_last_episode_has_and_a_successor_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 1)
        host = stage.hosts[10]
        host.episodes, host.num_begun = {1}, 5
        stage.pool.look_after(host)  # type: ignore[arg-type]
        await stage.until(lambda: stage.pool.num_ready == 1)
        assert stage.pool.place() is stage.hosts[11]
        assert host.check(), "its episode goes on"
        host.episodes = set()
        stage.pool.look_after(host)  # type: ignore[arg-type]
        await stage.until(lambda: stage.pool.pids == {11})
        assert host.killed_because == "the process has run the maximum number of episodes"
        assert stage.pool.counters == {"started": 2, "recycled": 1}

    perform(monkeypatch, scene, num_processes=1, recycle_after=5)


def sleeps_at_once(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    """Waits between starts are noted and not made; those of the watch are made."""
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds not in (0, module.WATCH_S):
            stage.slept_s.append(seconds)
        await real(seconds if seconds == module.WATCH_S else 0)

    monkeypatch.setattr(asyncio, "sleep", sleep)


def test_failed_starts_are_tried_again_ever_later_and_a_success_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        sleeps_at_once(monkeypatch, stage)
        await stage.until(lambda: stage.pool.num_ready == 1)
        stage.failures = [Died("no memory"), UserError("no file"), *(Died("again") for _ in range(5))]
        stage.hosts[10].gone.set_result("gone")
        await stage.until(lambda: stage.pool.num_ready == 1 and not stage.failures)
        assert stage.slept_s == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
        assert stage.pool.counters["failed_starts"] == 7
        (started,) = [pid for pid, host in stage.hosts.items() if host in stage.pool._ready]  # type: ignore[comparison-overlap]
        stage.slept_s.clear()
        stage.failures = [Died("no memory")]
        stage.hosts[started].gone.set_result("gone")
        await stage.until(lambda: stage.pool.num_ready == 1 and not stage.failures)
        assert stage.slept_s == [0.2]

    perform(monkeypatch, scene, num_processes=1)


def test_so_many_failed_starts_in_a_row_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        sleeps_at_once(monkeypatch, stage)
        await stage.until(lambda: stage.pool.num_ready == 1)
        stage.failures = [Died("no memory") for _ in range(MAX_FAILED_STARTS)]
        stage.hosts[10].gone.set_result("gone")
        await stage.until(lambda: not stage.failures)
        for _ in range(20):
            await asyncio.sleep(0)

    stage = perform(monkeypatch, scene, num_processes=1)
    error = stage.done[-1]
    assert isinstance(error, ExceptionGroup)
    text = "environment processes can no longer be started: no memory"
    assert [str(one) for one in error.exceptions] == [text]
    assert stage.pool.counters["failed_starts"] == MAX_FAILED_STARTS == 8


def test_watch_looks_at_time_always_and_at_memory_every_third_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.0)
    looked: list[tuple[str, int]] = []

    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 2)
        stage.hosts[11].killed_because = "it is on its way out"
        for what in ("time", "memory"):
            monkeypatch.setattr(stage.pool, f"_check_{what}", lambda host, what=what: looked.append((what, host.pid)))
        await stage.until(lambda: len(looked) >= 12)

    perform(monkeypatch, scene, num_processes=2)
    assert {pid for _, pid in looked} == {10}, "a process that is being killed is left alone"
    first = looked.index(("memory", 10))
    round_of_three = [what for what, _ in looked[first + 1 : first + 5]]
    assert round_of_three == ["time", "time", "time", "memory"]


def test_close_ends_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.pool.num_ready == 2)
        await stage.pool.close()
        assert stage.done == [("kill now", 10), ("close", 10), ("kill now", 11), ("close", 11)]
        assert (stage.pool.pids, stage.pool.place()) == (frozenset(), None)

    perform(monkeypatch, scene, num_processes=2)
