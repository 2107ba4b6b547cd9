"""Who has to go and whose fault it is, by what a process's marker says; no process is started."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from made_host import MB, NOW_S, FakeHost

from services.environment import pool as module
from services.environment.config import EnvironmentSettings
from services.environment.marker import NOBODY
from services.environment.pool import SILENT_S, HostPool


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr(module.process_tree, "kill_tree_now", pids.append)
    monkeypatch.setattr("time.monotonic", lambda: NOW_S)
    return pids


def pool_of(*hosts: FakeHost, **settings: Any) -> HostPool:
    async def make() -> HostPool:
        return HostPool(
            EnvironmentSettings(kind="guess_number", **settings),
            lambda *_: None,
            lambda *_: None,
            lambda: None,
            frozenset,
        )

    pool = asyncio.run(make())
    pool._ready = set(hosts)  # type: ignore[arg-type]
    return pool


@pytest.mark.parametrize(("ran_s", "is_killed"), [(10.0, False), (10.1, True)])
def test_the_episode_that_runs_past_its_time_is_at_fault(killed: list[int], ran_s: float, is_killed: bool) -> None:
    host = FakeHost(episode=4, since_s=NOW_S - ran_s)
    pool = pool_of(host, step_timeout_s=10.0)
    pool._check_time(host)  # type: ignore[arg-type]
    assert killed == ([7] if is_killed else [])
    assert (host.culprit, host.culprit_kind) == ((4, "timed_out") if is_killed else (NOBODY, "crashed"))
    assert ("took longer than 10 s" in host.killed_because) == is_killed


@pytest.mark.parametrize(("ran_s", "is_killed"), [(99.0, False), (101.0, True)])
def test_a_process_that_gets_no_processor_is_given_time(killed: list[int], ran_s: float, is_killed: bool) -> None:
    host = FakeHost(episode=4, since_s=NOW_S - ran_s)
    host.starved = True
    pool_of(host, step_timeout_s=10.0)._check_time(host)  # type: ignore[arg-type]
    assert bool(killed) == is_killed


@pytest.mark.parametrize(("past_s", "waiting", "is_killed"), [(0.0, {1}, False), (0.1, {1}, True), (0.1, set(), False)])
def test_a_process_that_owes_answers_and_stands_still_goes_and_nobody_is_at_fault(
    killed: list[int], past_s: float, waiting: set[int], is_killed: bool
) -> None:
    host = FakeHost()
    host.moved_s, host.waiting = NOW_S - 10.0 - SILENT_S - past_s, waiting
    pool_of(host, step_timeout_s=10.0)._check_time(host)  # type: ignore[arg-type]
    assert killed == ([7] if is_killed else [])
    assert host.culprit == NOBODY


@pytest.mark.parametrize(
    ("used_mb", "mark", "culprit"),
    [
        (101, {"episode": 4, "used_bytes": 20 * MB, "heaviest": 5, "heaviest_bytes": 60 * MB}, 4),
        (101, {"episode": 4, "used_bytes": 60 * MB, "heaviest": 5, "heaviest_bytes": 60 * MB}, 5),
        (101, {"heaviest": 5, "heaviest_bytes": 26 * MB}, 5),
        (101, {"heaviest": 5, "heaviest_bytes": 25 * MB}, NOBODY),
        (101, {"episode": 4, "used_bytes": 80 * MB}, NOBODY),
    ],
    ids=[
        "the running one",
        "the heaviest",
        "more than a quarter",
        "no more than a quarter",
        "a little by the running one",
    ],
)
def test_memory_is_blamed_on_the_episode_that_the_process_grew_for(
    killed: list[int], monkeypatch: pytest.MonkeyPatch, used_mb: int, mark: dict[str, int], culprit: int
) -> None:
    monkeypatch.setattr(module.process_tree, "tree_holds_more_than", lambda pid, limit: used_mb * MB)
    host = FakeHost(**mark)
    pool_of(host, max_memory_mb=100)._check_memory(host)  # type: ignore[arg-type]
    assert killed == [7]
    assert (host.culprit, host.culprit_kind) == (culprit, "crashed")
    assert "used 101 MB, which is more than max_memory_mb 100" in host.killed_because


def test_a_process_that_holds_half_of_its_memory_takes_no_further_episodes(
    killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module.process_tree, "tree_holds_more_than", lambda pid, limit: asked.append(limit) or 51 * MB)
    host, other = FakeHost(), FakeHost(pid=8, num_episodes=5)
    pool = pool_of(host, other, max_memory_mb=100)
    assert pool.place() is host, "the fewest episodes"
    pool._check_memory(host)  # type: ignore[arg-type]
    assert (killed, asked, host.is_retired) == ([], [50 * MB], True)
    assert pool.place() is other
    assert pool.num_ready == 1


@pytest.mark.parametrize(
    ("used_mb", "was_retired", "is_retired", "num_counted"),
    [(0, False, False, 0), (51, False, True, 1), (51, True, True, 0), (0, True, True, 0)],
)
def test_retirement_for_memory_is_counted_once_and_only_where_memory_is_held(
    killed: list[int], monkeypatch: pytest.MonkeyPatch,
    used_mb: int, was_retired: bool, is_retired: bool, num_counted: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(module.process_tree, "tree_holds_more_than", lambda pid, limit: used_mb * MB)
    host = FakeHost()
    host.is_retired = was_retired
    pool = pool_of(host, max_memory_mb=100)
    pool._check_memory(host)  # type: ignore[arg-type]
    assert (host.is_retired, pool.counters["retired_memory"], killed) == (is_retired, num_counted, [])
    assert pool._lost.is_set() == bool(num_counted), "a successor is to be started"


def test_each_reason_to_kill_a_process_is_counted(killed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.process_tree, "tree_holds_more_than", lambda pid, limit: 101 * MB)
    heavy, late, silent = FakeHost(1), FakeHost(2, episode=4, since_s=0.0), FakeHost(3)
    silent.moved_s = 0.0
    pool = pool_of(heavy, late, silent, max_memory_mb=100)
    pool._check_memory(heavy)  # type: ignore[arg-type]
    pool._check_time(late)  # type: ignore[arg-type]
    pool._check_time(silent)  # type: ignore[arg-type]
    assert killed == [1, 2, 3]
    assert pool.counters == {"killed_memory": 1, "killed_overdue": 1, "killed_silent": 1}


def test_a_process_retires_after_so_many_episodes() -> None:
    host = FakeHost()
    pool = pool_of(host, recycle_after=2)
    pool.look_after(host)  # type: ignore[arg-type]
    assert not host.is_retired
    assert not pool._lost.is_set()
    host.num_begun = 2
    pool.look_after(host)  # type: ignore[arg-type]
    assert host.is_retired
    assert pool._lost.is_set(), "a successor is to be started"
    assert pool.place() is None


def test_processes_that_live_are_bounded_and_the_retired_one_with_the_fewest_episodes_goes(killed: list[int]) -> None:
    hosts = [FakeHost(pid, num_episodes=pid) for pid in (5, 3, 4, 6)]
    pool = pool_of(*hosts, num_processes=2)
    for host in hosts[:3]:
        host.is_retired = True
    assert (pool._num_to_start(0), killed) == (0, [3])
    assert [(host.makes_room, host.culprit) for host in hosts[:2]] == [(False, NOBODY), (True, NOBODY)]
    assert (pool._num_to_start(0), killed) == (0, [3]), "one is on its way out already"
    pool._ready.remove(hosts[1])  # type: ignore[arg-type]
    pool._num_dying = 1
    assert pool._num_to_start(0) == 0
    pool._num_dying = 0
    assert pool._num_to_start(0) == 1
    assert (pool._num_to_start(1), killed) == (0, [3])
    assert pool.counters == {"killed_retired": 1}


def test_processes_that_start_take_room_as_well(killed: list[int]) -> None:
    hosts = [FakeHost(pid) for pid in (1, 2, 3)]
    for host in hosts:
        host.is_retired, host.killed_because = True, "it is on its way out"
    pool = pool_of(*hosts, num_processes=2)
    assert [pool._num_to_start(num_starting) for num_starting in (0, 1, 2)] == [1, 0, 0]
    assert killed == []


def test_a_process_is_killed_once_and_for_its_first_fault(killed: list[int]) -> None:
    host = FakeHost()
    pool = pool_of(host)
    pool.blame(host, 3, "timed_out", "first")  # type: ignore[arg-type]
    pool.blame(host, 4, "crashed", "second")  # type: ignore[arg-type]
    assert (killed, host.culprit, host.killed_because) == ([7], 3, "first")
    assert os.getpid() not in killed
