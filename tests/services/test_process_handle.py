"""Claims about one scoring process as the service sees it: what it prints, how an exchange ends, why it died."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from areal_like.errors import UserError
from services.processes import process_tree
from services.processes.child_process import LOGGED_BYTES_PER_MINUTE, Died, OutputLog
from services.processes.framing import MAX_ANSWER_BYTES, PREFIX, frame
from services.reward import process_handle as module
from services.reward.job import Began, Job, Outcome, Ready, Refusal, Setup, decode_for_process
from services.reward.process_handle import Overdue, ScoringProcess
from tests.open_descriptors import no_new_descriptors

LIMIT_S = 300.0
READY = Ready(names=["a"], label="a@1")


# ---------------------------------------------------------------- what scorers print


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    def go_on(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    return go_on


def test_scorers_may_print_so_much_a_minute_and_the_rest_is_counted(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    log = OutputLog()
    log.write(b"first ")
    clock(59.9)
    log.write(b"x" * LOGGED_BYTES_PER_MINUTE)
    assert capsys.readouterr().err == "first " + "x" * (LOGGED_BYTES_PER_MINUTE - 6)
    assert log.num_dropped_bytes == 6
    log.write(b"dropped")
    assert capsys.readouterr().err == ""
    assert log.num_dropped_bytes == 13
    clock(0.1)
    log.write(b"next minute \xff")
    assert capsys.readouterr().err == "next minute \ufffd"


def test_dropping_is_warned_of_once(clock: Callable[[float], None], caplog: pytest.LogCaptureFixture) -> None:
    log = OutputLog()
    log.write(b"x" * (LOGGED_BYTES_PER_MINUTE - 1))
    assert not caplog.records
    log.write(b"xx")
    log.write(b"xx")
    assert [record.message for record in caplog.records] == [
        "the output of scorers exceeds the limit and is discarded for up to a minute"
    ]


# ---------------------------------------------------------------- exchanges


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
    """A handle whose child is played by the test over the other end of its stream."""

    def __init__(self) -> None:
        self.child = FakeChild()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("subprocess.Popen", self._start)
            self.process = ScoringProcess.spawn(OutputLog())

    def _start(self, command: list[str], **more: Any) -> FakeChild:
        (fd,) = more["pass_fds"]
        assert command[-3:] == ["services.reward.scoring_process", "--fd", str(fd)]
        assert more["start_new_session"], "a Ctrl-C at the terminal is the service's to handle"
        assert more["stdout"] == more["stderr"]
        self.theirs = socket.socket(fileno=os.dup(fd))
        self.theirs.setblocking(False)
        self.output_fd = os.dup(more["stdout"])
        return self.child

    async def say(self, *messages: Any) -> None:
        for message in messages:
            body = message if isinstance(message, bytes) else frame(message)
            await asyncio.get_running_loop().sock_sendall(self.theirs, body)

    async def received(self) -> Setup | Job:
        loop = asyncio.get_running_loop()
        found = b""
        while len(found) < PREFIX.size or len(found) < PREFIX.size + PREFIX.unpack(found[: PREFIX.size])[0]:
            found += await loop.sock_recv(self.theirs, 1 << 16)
        return decode_for_process(found[PREFIX.size :])


@asynccontextmanager
async def ready_stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.say(READY)
    await stage.process.prepare(Setup(scorers=[], service_pid=1), LIMIT_S)
    await stage.received()
    try:
        yield stage
    finally:
        stage.child.status = 0
        stage.process.kill_now()
        stage.theirs.close()
        os.close(stage.output_fd)


def play(scene: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), ready_stage() as stage:
            await scene(stage)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def no_kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No test here may signal anybody."""
    killed: list[int] = []
    monkeypatch.setattr(process_tree, "kill_tree_now", lambda pid: killed.append(pid) or set())
    monkeypatch.setattr(module, "descendants_of", lambda pid: [pid + 1])
    return killed


def outcome(job_id: int = 1) -> Outcome:
    return Outcome(job_id=job_id, kind="scored", value=1.0)


def job(job_id: int = 1) -> bytes:
    return frame(Job(job_id=job_id, scorer="", row={}, response="r", finish_reason="stop", num_tokens=1))


def began(scorer: str, job_id: int = 1) -> Began:
    return Began(job_id=job_id, scorer=scorer)


def test_answer_is_the_outcome_of_the_job_that_was_sent() -> None:
    async def scene(stage: Stage) -> None:
        for number in (1, 2):
            await stage.say(began("a", number), began("b", number), outcome(number))
            assert await stage.process.score(job(number), number, LIMIT_S) == outcome(number)
            received = await stage.received()
            assert isinstance(received, Job)
            assert received.job_id == number
            assert stage.process.num_scored == number

    play(scene)


def test_process_without_an_answer_is_overdue_and_says_in_which_scorer() -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(began("a"), began("slow"))
        with pytest.raises(Overdue, match="slow did not end in time") as raised:
            await stage.process.score(job(), 1, 0.05)
        assert raised.value.scorer == "slow"
        assert stage.process.num_scored == 0

    play(scene)


def test_scorer_of_the_job_before_is_not_blamed() -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(began("a"), outcome())
        await stage.process.score(job(), 1, LIMIT_S)
        with pytest.raises(Overdue) as raised:
            await stage.process.score(job(2), 2, 0.01)
        assert raised.value.scorer == ""

    play(scene)


@pytest.mark.parametrize(
    "said",
    [
        (outcome(2),), (began("a", 2),), (READY,), (b"\0\0\0\1x",),
        (PREFIX.pack(MAX_ANSWER_BYTES + 1),),
    ],
)  # fmt: skip
def test_any_other_message_is_a_broken_stream(said: tuple[Any, ...]) -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(began("a"), *said)
        with pytest.raises(Died, match="the connection to the scoring process failed") as raised:
            await stage.process.score(job(), 1, LIMIT_S)
        assert raised.value.scorer == "a"

    play(scene)


def test_refusal_of_a_job_is_a_user_error_and_counts_nothing() -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(began("a"), Refusal(sentence="the key is not set"))
        with pytest.raises(UserError, match="the key is not set"):
            await stage.process.score(job(), 1, LIMIT_S)
        assert stage.process.num_scored == 0

    play(scene)


def test_answer_of_the_largest_size_is_read() -> None:
    async def scene(stage: Stage) -> None:
        room = MAX_ANSWER_BYTES - len(frame(Outcome(job_id=1, kind="invalid", reason="x" * 70_000))) + PREFIX.size
        large = Outcome(job_id=1, kind="invalid", reason="x" * (70_000 + room))
        assert len(frame(large)) == MAX_ANSWER_BYTES + PREFIX.size
        saying = asyncio.create_task(stage.say(large))
        assert await stage.process.score(job(), 1, LIMIT_S) == large
        await saying

    play(scene)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "the scoring process was killed by signal SIGKILL"),
        (-11, "the scoring process was killed by signal SIGSEGV"),
        (-63, "the scoring process was killed by signal 63"),
        (3, "the scoring process ended with status 3"),
        (0, "the scoring process ended with status 0"),
    ],
)
@pytest.mark.parametrize("is_stream_open", [False, True])
def test_death_says_how_whether_or_not_a_child_holds_the_stream(status: int, words: str, is_stream_open: bool) -> None:
    async def scene(stage: Stage) -> None:
        await stage.say(began("a"))
        scoring = asyncio.create_task(stage.process.score(job(), 1, LIMIT_S))
        await stage.received()
        stage.child.status = status
        if is_stream_open:
            stage.process.check()  # as the pool's watch does
        else:
            stage.theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Died) as raised:
            await scoring
        assert raised.value.reason == words
        assert raised.value.scorer == "a"
        assert raised.value.is_killed == (status == -9)

    play(scene)


def test_who_kills_it_from_outside_gives_the_reason() -> None:
    async def scene(stage: Stage) -> None:
        stage.process.killed_because = "too much memory"
        stage.child.status = -9
        stage.process.check()
        with pytest.raises(Died, match="too much memory"):
            await stage.process.score(job(), 1, LIMIT_S)

    play(scene)


def test_answer_that_was_given_before_the_death_counts() -> None:
    async def scene(stage: Stage) -> None:
        scoring = asyncio.create_task(stage.process.score(job(), 1, LIMIT_S))
        await stage.received()
        stage.child.status = 0
        stage.process.check()
        await asyncio.sleep(0)
        await stage.say(outcome())
        assert await scoring == outcome()

    play(scene)


# ---------------------------------------------------------------- start


def test_helpers_that_run_once_it_is_ready_are_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "living", lambda pids: {pid for pid in pids if pid != 9})

    async def scene(stage: Stage) -> None:
        helper = stage.process.pid + 1
        assert stage.process.leftover_processes() == set()
        monkeypatch.setattr(module, "descendants_of", lambda pid: [helper, 8, 9])
        assert stage.process.leftover_processes() == {8}, "neither its helper nor a dead one"

    play(scene)


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (Refusal(sentence="no such column"), UserError, "no such column"),
        (outcome(), Died, "sent an unexpected message while loading"),
        (None, Died, "loading the scorers took longer than 0.05 s"),
    ],
)
def test_start_that_fails_says_why(said: Any, kind: type[Exception], words: str) -> None:
    async def run() -> None:
        stage = Stage()
        if said is not None:
            await stage.say(said)
        with pytest.raises(kind, match=words):
            await stage.process.prepare(Setup(scorers=[], service_pid=1), 0.05 if said is None else LIMIT_S)
        stage.child.status = 0
        stage.process.kill_now()
        stage.theirs.close()
        os.close(stage.output_fd)

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_what_it_prints_is_passed_on_until_it_closes_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(stage: Stage) -> None:
        os.write(stage.output_fd, b"printed")
        while not (shown := capsys.readouterr().err):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert shown == "printed"
        process = stage.process
        process._drain_output()
        assert process._output_fd >= 0, "with nothing to read it stays open"
        os.close(stage.output_fd)
        stage.output_fd = os.open(os.devnull, os.O_RDONLY)
        while process._output_fd >= 0:  # noqa: ASYNC110
            await asyncio.sleep(0)

    play(scene)


# ---------------------------------------------------------------- end


def test_kill_ends_the_whole_tree_of_a_process_that_runs(
    monkeypatch: pytest.MonkeyPatch, no_kills: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    trees: list[int] = []

    async def scene(stage: Stage) -> None:
        async def kill_tree(pid: int) -> set[int]:
            trees.append(pid)
            stage.child.status = -9
            return {77} if stage.process.num_scored else set()

        monkeypatch.setattr(process_tree, "kill_tree", kill_tree)
        await stage.process.kill()
        assert trees == [stage.process.pid]
        assert stage.child.returncode == -9, "it is reaped"
        assert stage.process._output_fd == -1
        await stage.process.kill()
        assert trees == [stage.process.pid], "the number of a reaped process may be another's"
        stage.process.kill_now()
        assert not no_kills
        assert not caplog.records

    play(scene)


def test_what_survives_a_kill_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        async def kill_tree(pid: int) -> set[int]:
            stage.child.status = -9
            return {79, 78}

        monkeypatch.setattr(process_tree, "kill_tree", kill_tree)
        await stage.process.kill()

    play(scene)
    (record,) = caplog.records
    assert record.message == "the processes [78, 79] of the scoring process are still running after SIGKILL"


def test_kill_now_ends_the_tree_without_waiting_for_the_loop(no_kills: list[int]) -> None:
    async def scene(stage: Stage) -> None:
        stage.process.kill_now()
        assert no_kills == [stage.process.pid]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stage.theirs.setblocking(False)
        assert stage.theirs.recv(1) == b"", "its stream is closed"

    play(scene)


def test_process_that_cannot_be_started_is_a_death_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with no_new_descriptors(), pytest.raises(Died, match="the scoring process cannot be started: no memory"):
        ScoringProcess.spawn(OutputLog())
