"""What an environment process does with each call, without the process: answers, failures, what is blamed on whom."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from environment_zoo import Counter, Slow

from services.environment.config import EnvironmentSettings
from services.environment.host import Host
from services.environment.job import Act, Answered, Begin, Close, Failed
from services.environment.marker import NOBODY, Mark, Marker
from services.processes.framing import frame

MB = 1 << 20


class FakeUsage:
    """Memory and files that the test's environments take."""

    def __init__(self) -> None:
        self.bytes, self.files = 100 * MB, 10

    def num_bytes(self) -> int:
        return self.bytes

    def num_files(self) -> int:
        return self.files


class Taker:
    """Takes what its row says in each step, and notes what the marker says meanwhile."""

    stage: Stage

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    def step(self, action: str) -> tuple[str, float, bool]:
        self.stage.usage.bytes += self.row.get("mb", 0) * MB
        self.stage.usage.files += self.row.get("files", 0)
        self.stage.marks.append(self.stage.marker.look())
        return "taken", 0.0, False

    def close(self) -> None:
        self.stage.closed += 1
        if self.row.get("raises"):
            raise RuntimeError("it does not close")


class Stage:
    def __init__(self, make: Callable[[], Any] | None = None, **settings: Any) -> None:
        self.said: list[Answered | Failed] = []
        self.usage, self.closed = FakeUsage(), 0
        self.marks: list[Mark] = []
        self.marker, fd = Marker.make()
        self.other_end = Marker(fd)
        Taker.stage = self
        chosen = EnvironmentSettings(kind="guess_number", **settings)
        self.host = Host(make or Taker, chosen, self.marker, self.said.append, self.usage)  # type: ignore[arg-type]

    def begin(self, episode: int = 1, **row: Any) -> None:
        self.host.take(Begin(episode=episode, row=row, seed=7))

    def act(self, episode: int = 1, action: str = "a") -> Any:
        self.host.take(Act(episode=episode, action=action))
        return self.said[-1]

    async def until(self, num: int) -> None:
        """So many messages were sent."""
        while len(self.said) < num:  # noqa: ASYNC110  (what sends them is the loop itself)
            await asyncio.sleep(0.001)


def play(scene: Callable[[Stage], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(300.0):
            await scene(Stage(Slow, **settings))

    asyncio.run(whole())


def test_each_episode_is_an_object_of_its_own() -> None:
    stage = Stage(Counter)
    stage.begin(1)
    stage.begin(2)
    stage.act(1)
    assert stage.act(1).step.observation == "7:2:a"
    assert stage.act(2).step.observation == "7:1:a"


def test_the_marker_names_the_episode_while_its_code_runs_and_nobody_afterwards() -> None:
    stage = Stage()
    stage.begin(4)
    stage.act(4)
    assert [(mark.episode, mark.used_bytes) for mark in stage.marks] == [(4, 100 * MB)]
    after = stage.other_end.look()
    assert (after.episode, after.calls) == (NOBODY, 2)


def test_the_episode_that_the_process_grew_most_for_is_known_and_forgotten_with_its_end() -> None:
    stage = Stage()
    for episode, mb in ((1, 3), (2, 40), (3, 5)):
        stage.begin(episode, mb=mb)
        stage.act(episode)
    assert stage.other_end.look()[4:] == (2, 40 * MB)
    stage.host.take(Close(episode=2))
    stage.act(1)
    assert stage.other_end.look()[4:] == (1, 6 * MB)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"mb": 40}, "used 80 MB, which is more than max_episode_memory_mb 64"),
        ({"files": 5}, "the episode has 10 open files, which is more than max_episode_files 9"),
    ],
)
def test_what_an_episode_takes_adds_up_and_ends_it(row: dict[str, int], words: str) -> None:
    stage = Stage(max_episode_memory_mb=64, max_episode_files=9)
    stage.begin(1, **row)
    assert isinstance(stage.act(), Answered)
    failed = stage.act()
    assert (failed.kind, failed.is_left) == ("crashed", True)
    assert words in failed.reason
    assert stage.closed == 1


def test_what_others_take_is_not_blamed_on_an_episode() -> None:
    stage = Stage(max_episode_memory_mb=64)
    stage.begin(1)
    stage.begin(2, mb=60)
    stage.act(2)
    assert isinstance(stage.act(1), Answered)


def test_an_episode_that_is_over_is_closed_once_and_not_called_again() -> None:
    stage = Stage()
    stage.begin(1, raises=True)
    stage.host.take(Close(episode=1))
    stage.host.take(Close(episode=1))
    num_said = len(stage.said)
    stage.host.take(Act(episode=1, action="a"))
    assert (stage.closed, len(stage.said)) == (1, num_said)


def test_a_class_that_cannot_be_made_for_an_episode_fails_that_episode() -> None:
    stage = Stage(lambda: 1 / 0)
    stage.begin()
    (failed,) = stage.said
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.reason) == ("crashed", "reset raised ZeroDivisionError: division by zero")


class Unkind:
    """Its reward, its `close` and its exceptions raise, and it closes stderr, as its row says; it notes the marker."""

    marks: list[int]
    marker: Marker

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    def step(self, action: str) -> Any:
        if self.row["at"] == "stderr":
            sys.stderr = object()  # type: ignore[assignment]
        if self.row["at"] != "reward":
            raise (Unspeakable if self.row["at"] == "text" else LookupError)("\ud800")
        return "", Unspeakable(), False

    def __getattr__(self, name: str) -> Any:
        Unkind.marks.append(Unkind.marker.look().episode)
        raise LookupError(name)


class AsyncUnkind(Unkind):
    async def step(self, action: str) -> Any:
        return super().step(action)


class Unspeakable(Exception):
    def __float__(self) -> float:
        Unkind.marks.append(Unkind.marker.look().episode)
        raise SystemExit(3)

    def __str__(self) -> str:
        Unkind.marks.append(Unkind.marker.look().episode)
        raise RuntimeError("no words")


@pytest.mark.parametrize("make", [Unkind, AsyncUnkind])
@pytest.mark.parametrize(
    ("at", "kind", "words"),
    [
        ("reward", "invalid", "step: the returned value raised SystemExit: 3"),
        ("stderr", "crashed", "step raised LookupError: ?"),
        ("text", "crashed", "step raised Unspeakable: (the message cannot be shown)"),
    ],
)
def test_users_code_behind_a_returned_value_an_exception_or_close_is_its_episodes(
    make: Any, at: str, kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    async def scene() -> None:
        stage = Stage(make)
        Unkind.marks, Unkind.marker = [], stage.other_end
        stage.begin(5, at=at)
        stage.host.take(Act(episode=5, action="a"))
        async with asyncio.timeout(300.0):
            await stage.until(2)
        failed = stage.said[1]
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.reason) == (kind, words)
        frame(failed)
        assert set(Unkind.marks) == {5}, "all of it ran in the episode's stretch"

    asyncio.run(scene())


def test_async_methods_of_many_episodes_wait_at_the_same_time() -> None:
    async def scene(stage: Stage) -> None:
        for episode in (1, 2, 3):
            stage.begin(episode)
        assert stage.said == [], "all three wait"
        await stage.until(3)
        assert [one.episode for one in stage.said] == [1, 2, 3]

    play(scene)


def test_an_async_method_past_its_time_is_cancelled_and_others_go_on() -> None:
    async def scene(stage: Stage) -> None:
        stage.begin(1, mode="wait")
        stage.begin(2)
        await stage.until(2)
        stage.host.take(Act(episode=1, action="a"))
        stage.host.take(Act(episode=2, action="b"))
        await stage.until(4)
        answered, failed = stage.said[2:]
        assert isinstance(answered, Answered)
        assert answered.step.observation == "B"
        assert isinstance(failed, Failed)
        assert (failed.episode, failed.kind, failed.is_left) == (1, "timed_out", True)

    play(scene, step_timeout_s=0.05)


def test_an_answer_of_an_episode_that_was_closed_meanwhile_is_dropped() -> None:
    async def scene(stage: Stage) -> None:
        stage.begin(1)
        stage.host.take(Close(episode=1))
        stage.begin(2)
        await stage.until(1)
        assert [one.episode for one in stage.said] == [2]

    play(scene)


class Clinging:
    """Its `close` hangs where the row says so; another `except` than BaseException does not let it go on."""

    num_closed = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.hangs = row.get("hangs", False)

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, False

    def close(self) -> None:
        type(self).num_closed += 1
        with contextlib.suppress(Exception):
            threading.Event().wait(600 if self.hangs else 0)


def test_close_that_hangs_is_interrupted_and_after_three_none_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    Clinging.num_closed = 0
    stage = Stage(Clinging, close_timeout_s=0.01)
    for episode in range(1, 6):
        stage.begin(episode, hangs=episode > 1)
        stage.host.take(Close(episode=episode))
    assert Clinging.num_closed == 4
    assert stage.other_end.look().episode == NOBODY
    assert capsys.readouterr().err.count("`close` of the environment took longer than 0.01 s") == 3
    stage.begin(9)
    stage.act(9)
    stage.host.take(Close(episode=9))
    assert Clinging.num_closed == 4
