"""Claims about one environment process as the service sees it; its child is played by the test."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from areal_like.environment import Step
from areal_like.errors import UserError
from services.environment import host_process as module
from services.environment.host_process import HostProcess
from services.environment.job import (
    Act,
    Answered,
    Begin,
    Close,
    Failed,
    HostReady,
    HostRefusal,
    HostSetup,
    decode_for_process,
)
from services.environment.marker import NOBODY, Mark, Marker
from services.processes import process_tree
from services.processes.child_process import Died, OutputLog
from services.processes.framing import PREFIX, frame

LIMIT_S = 300.0
SETUP = HostSetup(settings={"kind": "guess_number"}, service_pid=1)


class FakeChild:
    """The process; `status` is its exit status, None while it runs."""

    def __init__(self) -> None:
        self.pid = 4242
        self.status: int | None = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self.status
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        return self.poll()


class Stage:
    """A handle whose child is the test, at the other end of its stream."""

    def __init__(self) -> None:
        self.child = FakeChild()
        self.said: list[Answered | Failed] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("subprocess.Popen", self._start)
            self.process = HostProcess.start(OutputLog())

    def _start(self, command: list[str], **more: Any) -> FakeChild:
        stream_fd, marker_fd = more["pass_fds"]
        assert command[-6:-4] == ["-m", "services.environment.host"] or "services.environment.host" in command
        assert command[-4:] == ["--marker", str(marker_fd), "--fd", str(stream_fd)]
        self.marker = Marker(marker_fd)
        self.theirs = socket.socket(fileno=os.dup(stream_fd))
        self.theirs.setblocking(False)
        return self.child

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await asyncio.get_running_loop().sock_sendall(self.theirs, frame(message))

    async def received(self, number: int = 1) -> list[Any]:
        loop, found, messages = asyncio.get_running_loop(), b"", []
        while len(messages) < number:
            while len(found) < PREFIX.size or len(found) < PREFIX.size + PREFIX.unpack(found[: PREFIX.size])[0]:
                found += await loop.sock_recv(self.theirs, 1 << 16)
            length = PREFIX.size + PREFIX.unpack(found[: PREFIX.size])[0]
            messages.append(decode_for_process(found[PREFIX.size : length]))
            found = found[length:]
        return messages

    async def until(self, number: int) -> None:
        while len(self.said) < number:  # noqa: ASYNC110  (what takes them is the loop itself)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def new_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    try:
        yield stage
    finally:
        stage.child.status = 0
        stage.process.kill_now()
        stage.process.close_marker()
        stage.theirs.close()


def play(scene: Callable[[Stage], Coroutine[Any, Any, None]], *, is_ready: bool = True) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), new_stage() as stage:
            if is_ready:
                await stage.say(HostReady())
                await stage.process.prepare(SETUP, LIMIT_S)
                assert await stage.received() == [SETUP]
            await scene(stage)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def no_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may signal anybody."""
    monkeypatch.setattr(process_tree, "kill_tree_now", lambda pid: set())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time as the handle sees it; the loop keeps its own."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def begin(episode: int) -> Begin:
    return Begin(episode=episode, row={}, seed=1)


def act(episode: int) -> Act:
    return Act(episode=episode, action="a")


def answered(episode: int) -> Answered:
    return Answered(episode=episode, step=Step(observation="o"))


# ---------------------------------------------------------------- loading


def test_refusal_of_the_environment_is_the_users_mistake_in_its_own_words() -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(HostRefusal(sentence="no class Foo"))
        with pytest.raises(UserError, match="no class Foo"):
            await stage.process.prepare(SETUP, LIMIT_S)

    play(scene, is_ready=False)


def test_process_that_says_something_else_first_or_nothing_in_time_has_not_started() -> None:
    async def odd(stage: Stage) -> None:
        await stage.say(answered(1))
        with pytest.raises(Died, match="sent an unexpected message while loading"):
            await stage.process.prepare(SETUP, LIMIT_S)

    async def silent(stage: Stage) -> None:
        with pytest.raises(Died, match=r"loading the environment took longer than 0\.01 s"):
            await stage.process.prepare(SETUP, 0.01)

    play(odd, is_ready=False)
    play(silent, is_ready=False)


def test_process_that_ends_while_loading_says_how() -> None:
    async def scene(stage: Stage) -> None:
        stage.child.status = 3
        stage.theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Died, match="the environment process ended with status 3"):
            await stage.process.prepare(SETUP, LIMIT_S)

    play(scene, is_ready=False)


# ---------------------------------------------------------------- episodes


def test_messages_arrive_in_order_and_the_handle_knows_what_its_process_holds_and_owes() -> None:
    async def scene(stage: Stage) -> None:
        process = stage.process
        assert (process.episodes, process.waiting, process.num_begun, process.is_retired) == (set(), set(), 0, False)
        for message in (begin(1), begin(2), act(1), Close(episode=1)):
            process.send(message)
        assert await stage.received(4) == [begin(1), begin(2), act(1), Close(episode=1)]
        assert (process.episodes, process.waiting, process.num_begun) == ({2}, {2}, 2)

    play(scene)


def test_messages_for_a_process_that_is_gone_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        stage.theirs.close()
        for episode in range(1, 20):
            stage.process.send(begin(episode))
            await asyncio.sleep(0)
        assert stage.process.episodes == set(range(1, 20)), "`run` says that it is gone, and they go elsewhere"

    play(scene)
    assert not caplog.records


def test_answers_are_passed_on_and_owed_no_longer_while_a_failure_ends_its_episode() -> None:
    async def scene(stage: Stage) -> None:
        process = stage.process
        running = asyncio.create_task(process.run(stage.said.append))
        for episode in (1, 2, 3):
            process.send(begin(episode))
        failed = Failed(episode=2, kind="crashed", reason="r")
        await stage.say(answered(1), failed)
        await stage.until(2)
        assert stage.said == [answered(1), failed]
        assert (process.episodes, process.waiting, process.is_retired) == ({1, 3}, {3}, False)
        await stage.say(Failed(episode=3, kind="timed_out", reason="r", is_left=True))
        await stage.until(3)
        assert process.is_retired, "something of the episode may be left in it"
        await stage.say(Failed(episode=1, kind="crashed", reason="r"))
        await stage.until(4)
        assert process.is_retired, "once is enough"
        assert (process.episodes, process.waiting) == (set(), set())
        running.cancel()

    play(scene)


def test_last_answer_of_a_process_that_ended_is_passed_on_and_its_end_is_explained() -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(answered(1))
        stage.child.status = -9
        assert not stage.process.check()
        reason = await stage.process.run(stage.said.append)
        assert reason == "the environment process was killed by signal SIGKILL"
        assert stage.said == [answered(1)]

    play(scene)


@pytest.mark.parametrize("killed_because", ["", "it took longer than 10 s"])
def test_process_that_breaks_its_stream_is_gone_for_the_reason_it_was_killed_for(killed_because: str) -> None:
    async def scene(stage: Stage) -> None:
        stage.process.killed_because = killed_because
        await stage.say(HostReady())
        reason = await stage.process.run(stage.said.append)
        broken = "the connection to the environment process failed (ValueError: unexpected HostReady)"
        assert reason == (killed_because or broken)
        assert stage.said == []

    play(scene)


# ---------------------------------------------------------------- does it move


def test_process_moves_with_each_answer_and_with_the_first_question_after_a_rest(clock: SimpleNamespace) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.process
        running = asyncio.create_task(process.run(stage.said.append))
        clock.now_s = 110.0
        process.send(begin(1))
        assert process.moved_s == 110.0
        clock.now_s = 120.0
        process.send(begin(2))
        process.send(Close(episode=2))
        assert process.moved_s == 110.0, "it owes an answer already"
        clock.now_s = 130.0
        await stage.say(answered(1))
        await stage.until(1)
        assert process.moved_s == 130.0
        clock.now_s = 140.0
        process.send(Close(episode=1))
        assert process.moved_s == 130.0, "to close is no question"
        process.send(begin(3))
        assert process.moved_s == 140.0
        running.cancel()

    play(scene)


def test_process_moves_where_its_marker_shows_another_call(clock: SimpleNamespace) -> None:
    async def scene(stage: Stage) -> None:
        process = stage.process
        clock.now_s = 110.0
        assert process.look().episode == NOBODY
        assert process.moved_s == 100.0
        stage.marker.enter(5, 77)
        mark = process.look()
        assert (mark.episode, mark.calls, mark.used_bytes) == (5, 1, 77)
        assert process.moved_s == 110.0
        clock.now_s = 120.0
        process.look()
        assert process.moved_s == 110.0, "the same call"
        stage.marker.leave()
        process.look()
        assert process.moved_s == 110.0

    play(scene)


class FakePs:
    """What psutil says of the process."""

    used, status_is = (1.0, 0.5, 40.0, 40.0), psutil.STATUS_RUNNING
    is_gone = False

    def __init__(self, pid: int) -> None:
        assert pid == 4242
        if FakePs.is_gone:
            raise psutil.NoSuchProcess(pid)

    def cpu_times(self) -> tuple[float, ...]:
        return FakePs.used

    def status(self) -> str:
        return FakePs.status_is


def test_call_is_starved_while_it_would_run_and_has_had_less_processor_time_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "Process", FakePs)

    async def scene(stage: Stage) -> None:
        def is_starved(calls: int, used: tuple[float, ...], status: str = psutil.STATUS_RUNNING) -> bool:
            monkeypatch.setattr(FakePs, "used", used)
            monkeypatch.setattr(FakePs, "status_is", status)
            mark = Mark(episode=1, since_s=0.0, calls=calls, used_bytes=0, heaviest=0, heaviest_bytes=0)
            return stage.process.is_starved(mark, 10.0)

        assert is_starved(1, (20.0, 5.0, 0.0, 0.0)), "what came before the call does not count"
        assert is_starved(1, (25.0, 9.9, 99.0, 99.0)), "nor the time of its children"
        assert not is_starved(1, (26.0, 9.0, 0.0, 0.0)), "it has had its time"
        assert is_starved(2, (26.0, 9.0, 0.0, 0.0)), "a new call has had none"
        assert not is_starved(2, (26.0, 9.0, 0.0, 0.0), psutil.STATUS_SLEEPING), "it waits for something else"
        monkeypatch.setattr(FakePs, "is_gone", True)
        assert is_starved(2, (26.0, 9.0, 0.0, 0.0)) is False

    play(scene)
