"""What an environment process measures of itself, and how it lets go of the user's coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import threading
from typing import Any

import psutil
import pytest

from services.environment.config import EnvironmentSettings
from services.environment.host import Host, Usage, _Marked
from services.environment.job import Act, Answered, Begin, Close, Failed
from services.environment.marker import NOBODY, Marker


def test_usage_is_the_memory_and_the_files_of_this_process(tmp_path: Any) -> None:
    usage = Usage()
    assert usage.num_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    before = usage.num_files()
    with (tmp_path / "one").open("w"), (tmp_path / "two").open("w"):
        assert usage.num_files() == before + 2
    assert usage.num_files() == before


def test_usage_is_nothing_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setattr(os, "listdir", refuse)
    usage = Usage()
    assert (usage.num_bytes(), usage.num_files()) == (0, 0)


def host_of(environment: Any, **settings: Any) -> tuple[Host, list[Answered | Failed]]:
    said: list[Answered | Failed] = []
    marker, fd = Marker.make()
    os.close(fd)
    chosen = EnvironmentSettings(kind="guess_number", **settings)
    host = Host(lambda: environment, chosen, marker, said.append)
    host.take(Begin(episode=1, row={}, seed=1))
    return host, said


@pytest.mark.parametrize(("num_chars", "is_answered"), [(1024, True), (1025, False)])
def test_an_observation_is_as_long_as_the_settings_say_and_no_longer(num_chars: int, is_answered: bool) -> None:
    class Talker:
        def reset(self, row: Any, seed: int) -> str:
            return "x" * num_chars

    _, (said,) = host_of(Talker(), max_observation_kb=1)
    assert isinstance(said, Answered) == is_answered


def test_a_coroutine_that_is_cancelled_for_its_time_may_end_what_it_does() -> None:
    class Careful:
        def __init__(self) -> None:
            self.events: list[str] = []
            self.going = asyncio.Event()

        def reset(self, row: Any, seed: int) -> str:
            return ""

        async def step(self, action: str) -> Any:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.events.append("cancelled")
                await self.going.wait()
                self.events.append("ended")
                raise

    async def scene() -> None:
        careful = Careful()
        host, said = host_of(careful, step_timeout_s=0.01)
        host.take(Act(episode=1, action="a"))
        assert len(host._tasks) == 1, "the loop itself keeps no task alive"
        while careful.events != ["cancelled"]:  # noqa: ASYNC110  (the loop itself brings it about)
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        assert careful.events == ["cancelled"], "it waits on"
        careful.going.set()
        while careful.events[-1] != "ended":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert [type(message) for message in said] == [Answered, Failed]
        assert not host._tasks

    async def bounded() -> None:
        async with asyncio.timeout(20.0):
            await scene()

    asyncio.run(bounded())


def test_a_coroutine_that_is_closed_runs_its_last_lines() -> None:
    events: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            events.append("closed")

    async def scene() -> None:
        marked = _Marked(inner(), contextlib.nullcontext)
        marked.send(None)
        marked.close()

    asyncio.run(scene())
    assert events == ["closed"]


# ---------------------------------------------------------------- limits


class FakeUsage(Usage):
    """Memory and files that the environments of a test take."""

    def __init__(self) -> None:
        self.bytes = self.files = 0

    def num_bytes(self) -> int:
        return self.bytes

    def num_files(self) -> int:
        return self.files


class Stage:
    """A host of one environment class, its messages, and its marker as the service sees it."""

    def __init__(self, make: Any, **settings: Any) -> None:
        self.said: list[Answered | Failed] = []
        self.usage = FakeUsage()
        marker, fd = Marker.make()
        self.seen = Marker(fd)
        chosen = EnvironmentSettings(kind="guess_number", **settings)
        self.host = Host(make, chosen, marker, self.said.append, self.usage)

    def begin(self, episode: int = 1) -> Answered | Failed:
        self.host.take(Begin(episode=episode, row={}, seed=1))
        return self.said[-1]


@pytest.mark.parametrize("more", [0, 1])
def test_an_episode_may_take_just_what_the_settings_allow(more: int) -> None:
    class Taker:
        def reset(self, row: Any, seed: int) -> str:
            stage.usage.bytes += (64 + more) << 20
            return ""

    stage = Stage(Taker, max_episode_memory_mb=64)
    assert isinstance(stage.begin(), Failed if more else Answered)
    assert stage.seen.look()[4:] == ((NOBODY, 0) if more else (1, 64 << 20))

    class Opener:
        def reset(self, row: Any, seed: int) -> str:
            stage.usage.files += 9 + more
            return ""

    stage = Stage(Opener, max_episode_files=9)
    assert isinstance(stage.begin(), Failed if more else Answered)


def test_what_an_environment_prints_is_written_while_it_is_still_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out(io.StringIO):
        def flush(self) -> None:
            flushed.append((self.getvalue(), stage.seen.look().episode))

    class Printer:
        def reset(self, row: Any, seed: int) -> str:
            print("hello")
            return ""

    flushed: list[tuple[str, int]] = []
    stage = Stage(Printer)
    monkeypatch.setattr(sys, "stdout", Out())
    stage.begin(7)
    assert flushed == [("hello\n", 7)]


# ---------------------------------------------------------------- close


class Closing:
    """Its `close` does what the test says."""

    def __init__(self, close: Any) -> None:
        self.close = close

    def reset(self, row: Any, seed: int) -> str:
        return ""


def test_close_that_raises_is_shown_and_costs_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    def close() -> None:
        raise RuntimeError("it does not close")

    stage = Stage(lambda: Closing(close))
    stage.begin()
    stage.host.take(Close(episode=1))
    assert "RuntimeError: it does not close" in capsys.readouterr().err
    assert [type(message) for message in stage.said] == [Answered]


def test_the_last_close_that_hangs_says_that_none_is_called_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage(lambda: Closing(lambda: threading.Event().wait(600)), close_timeout_s=0.01)
    for episode in range(1, 4):
        stage.begin(episode)
        stage.host.take(Close(episode=episode))
    *first, last = capsys.readouterr().err.splitlines()
    assert first == ["`close` of the environment took longer than 0.01 s"] * 2
    assert last == "`close` of the environment took longer than 0.01 s; it is no longer called in this process"


def test_async_close_is_awaited_and_cancelled_past_its_time() -> None:
    events: list[Any] = []

    async def close() -> None:
        events.append(stage.seen.look().episode)
        await asyncio.sleep(0)
        events.append("waits")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    stage = Stage(lambda: Closing(close), close_timeout_s=0.05)

    async def scene() -> None:
        stage.begin(3)
        stage.host.take(Close(episode=3))
        async with asyncio.timeout(20.0):
            while len(events) < 3:  # noqa: ASYNC110  (the loop itself brings it about)
                await asyncio.sleep(0.001)

    asyncio.run(scene())
    assert events == [3, "waits", "cancelled"]
