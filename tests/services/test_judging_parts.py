"""Claims about the scoring process's supervisor and its client, without a sandbox: who is asked, who is replaced."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal_like.errors import UserError
from services.reward.code_options import CodeOptions
from services.reward.judging import client, supervisor
from services.reward.judging.client import JudgeLost, Judges, NoSandbox
from services.reward.judging.problem import Streams, Task
from services.reward.judging.supervisor import receive, send
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.layers import LAYERS, LayerMissing
from services.reward.scorers import programs
from services.reward.scorers.port import CannotJudge, ScorerInput
from services.reward.scorers.programs import CodeScorer, SandboxBroke

LIMIT_S = 300.0
TASK = Task("print(1)", Streams((("", "1"),)), {}, 3.0)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(LIMIT_S)
    yield ours, theirs
    ours.close()
    theirs.close()


# ---------------------------------------------------------------- messages


def test_message_of_any_text_and_length_arrives_and_an_end_is_none(pair: Any) -> None:
    ours, theirs = pair
    for message in ({"text": "\ud800é\0"}, {"long": "x" * 3_000_000}, {}):
        sender = threading.Thread(target=send, args=(ours, message))
        sender.start()
        assert receive(theirs) == message
        sender.join(LIMIT_S)
    ours.sendall(b"\0\0\0\x09half")
    ours.shutdown(socket.SHUT_WR)
    assert receive(theirs) is None
    assert receive(theirs) is None


# ---------------------------------------------------------------- the supervisor


class FakeJudge:
    def __init__(self, sandbox: Any) -> None:
        self.pids = {11}
        self.log: list[str] = []
        FakeJudge.made = self

    made: FakeJudge

    def warm_up(self) -> None:
        self.log.append("warm up")

    def judge(self, task: Task) -> dict[str, Any]:
        self.log.append(f"judge {task.program}")
        return {"judged": task.program}

    def close(self) -> None:
        self.log.append("close")


class FakeSandbox:
    class layers:
        chosen, words = "landlock", "landlock works"


def supervised(
    pair: Any, monkeypatch: pytest.MonkeyPatch, *messages: dict[str, Any], missing: str = ""
) -> tuple[int, list[dict[str, Any]], list[Any]]:
    """Exit status, answers, and what the sandbox was asked for."""
    ours, theirs = pair
    asked: list[Any] = []

    def find(required: str, allowed: tuple[str, ...], python: str) -> Any:
        asked.append((required, allowed, python))
        if missing:
            raise LayerMissing(missing)
        return FakeSandbox

    monkeypatch.setattr(supervisor, "find_sandbox", find)
    monkeypatch.setattr(supervisor, "Judge", FakeJudge)
    monkeypatch.setattr(supervisor, "_end_orphans", lambda known: FakeJudge.made.log.append(f"end all but {known}"))
    for message in messages:
        send(ours, message)
    ours.shutdown(socket.SHUT_WR)
    status = supervisor.serve(theirs)
    theirs.shutdown(socket.SHUT_WR)
    answers = []
    while (answer := receive(ours)) is not None:
        answers.append(answer)
    return status, answers, asked


def test_supervisor_says_its_layer_and_judges_one_program_after_the_other(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"required": "landlock", "python": "/py", "allowed": ["landlock"]}
    other = Task("other", Streams(()), {}, 1.0)
    status, answers, asked = supervised(pair, monkeypatch, wanted, TASK.as_dict(), other.as_dict())
    assert status == 0
    assert asked == [("landlock", ("landlock",), "/py")]
    assert answers == [{"layer": "landlock", "words": "landlock works"}, {"judged": "print(1)"}, {"judged": "other"}]
    assert FakeJudge.made.log == [
        "warm up", "judge print(1)", "end all but {11}", "judge other", "end all but {11}", "close"
    ]  # fmt: skip


def test_without_a_choice_every_layer_may_be_tried(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, asked = supervised(pair, monkeypatch, {"required": "limits", "python": "", "allowed": []})
    assert asked == [("limits", tuple(LAYERS), "")]


def test_layer_that_is_missing_is_answered_and_ends_it(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"required": "namespaces", "python": "", "allowed": []}
    status, answers, _ = supervised(pair, monkeypatch, wanted, missing="no user namespaces")
    assert (status, answers) == (2, [{"missing": "no user namespaces"}])


def test_nobody_asking_ends_it(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised(pair, monkeypatch) == (1, [], [])


def test_supervisor_dies_with_its_parent_and_cannot_be_read_by_others_of_its_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers are the kernel's (linux/prctl.h)."""
    calls: list[tuple[int, ...]] = []

    class Library:
        def prctl(self, *arguments: int) -> int:
            calls.append(arguments)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library())
    supervisor.protect_process()
    assert calls == [(1, signal.SIGKILL, 0, 0, 0), (4, 0, 0, 0, 0), (36, 1, 0, 0, 0)]
    statuses: list[int] = []
    parents = iter([10, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", statuses.append)
    supervisor.protect_process()
    assert statuses == [1], "a parent that died before it could be watched"


def test_orphans_are_killed_and_reaped_until_none_is_left_and_the_known_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = iter([[11, 12, 13], [11, 13], [11]])
    killed: list[tuple[int, int]] = []
    reaped: list[int] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 12:
            raise ProcessLookupError

    def wait(pid: int, options: int) -> tuple[int, int]:
        assert options == os.WNOHANG
        reaped.append(pid)
        if pid == 12:
            raise ChildProcessError
        return pid, 0

    monkeypatch.setattr(supervisor, "children_of", lambda pid: next(children))
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(os, "waitpid", wait)
    supervisor._end_orphans({11})
    assert sorted(killed) == [(12, signal.SIGKILL), (13, signal.SIGKILL), (13, signal.SIGKILL)]
    assert sorted(reaped) == [12, 13, 13]


# ---------------------------------------------------------------- the client


class FakeSupervisor:
    """Plays the child; answers each message with what `script` says: an answer, or None to end."""

    def __init__(self, *script: dict[str, Any] | None) -> None:
        self.script = list(script)
        self.started: list[list[str]] = []
        self.received: list[dict[str, Any]] = []
        self.num_kills = self.num_waits = 0

    def __call__(self, command: list[str], **more: Any) -> FakeSupervisor:
        (fd,) = more["pass_fds"]
        assert more["stdin"] is subprocess.DEVNULL
        self.started.append(command)
        threading.Thread(target=self._run, args=(socket.socket(fileno=os.dup(fd)),), daemon=True).start()
        return self

    def _run(self, stream: socket.socket) -> None:
        with stream:
            while (message := receive(stream)) is not None:
                self.received.append(message)
                answer = self.script.pop(0) if self.script else None
                if answer is None:
                    return
                send(stream, answer)

    def kill(self) -> None:
        self.num_kills += 1

    def wait(self) -> int:
        self.num_waits += 1
        return 0


LAYER = {"layer": "landlock", "words": "landlock works"}


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What runs when the interpreter exits."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", lambda one: registered.remove(one) if one in registered else None)
    return registered


def judges_of(monkeypatch: pytest.MonkeyPatch, *script: dict[str, Any] | None) -> tuple[Judges, FakeSupervisor]:
    child = FakeSupervisor(*script)
    monkeypatch.setattr("subprocess.Popen", child)
    return Judges("landlock", "/py", ("landlock",)), child


def test_client_starts_one_supervisor_and_hands_it_one_program_after_the_other(
    monkeypatch: pytest.MonkeyPatch, exits: list[Any]
) -> None:
    judges, child = judges_of(monkeypatch, LAYER, {"n": 1}, {"n": 2})
    judges.start()
    assert (judges.layer, judges.words) == ("landlock", "landlock works")
    assert [judges.judge(TASK), judges.judge(TASK)] == [{"n": 1}, {"n": 2}]
    assert child.received == [
        {"required": "landlock", "python": "/py", "allowed": ["landlock"]},
        *[json.loads(json.dumps(TASK.as_dict()))] * 2,
    ]
    ((command),) = child.started
    assert command[-3:-1] == ["services.reward.judging.supervisor", "--fd"]
    assert exits == [judges.close], "it ends with the interpreter"
    judges.close()
    assert exits == []
    assert (child.num_kills, child.num_waits) == (1, 1)
    judges.close()
    assert child.num_kills == 1, "closed is closed"


def test_client_without_a_supervisor_starts_one_for_the_next_program(
    monkeypatch: pytest.MonkeyPatch, exits: list[Any]
) -> None:
    judges, child = judges_of(monkeypatch, LAYER, None, LAYER, {"n": 2})
    judges.start()
    with pytest.raises(JudgeLost, match="the code sandbox closed its connection"):
        judges.judge(TASK)
    assert (child.num_kills, child.num_waits) == (1, 1), "the lost one is reaped"
    assert judges.judge(TASK) == {"n": 2}
    assert len(child.started) == 2
    judges.close()


def test_supervisor_that_hangs_is_given_up_after_the_programs_time_and_some_room(
    monkeypatch: pytest.MonkeyPatch, exits: list[Any]
) -> None:
    judges, child = judges_of(monkeypatch, LAYER)
    judges.start()
    waits: list[float] = []

    class Hanging:
        def settimeout(self, seconds: float) -> None:
            waits.append(seconds)

        def sendall(self, body: bytes) -> None: ...

        def recv(self, size: int) -> bytes:
            raise TimeoutError("timed out")

        def close(self) -> None: ...

    judges._stream.close()  # type: ignore[union-attr]
    judges._stream = Hanging()  # type: ignore[assignment]
    with pytest.raises(JudgeLost, match=r"failed \(TimeoutError: timed out\)"):
        judges.judge(TASK)
    assert waits == [Deadline(TASK.total_limit_s).wall_s + client.ANSWER_ROOM_S]
    assert client.ANSWER_ROOM_S > supervisor.ROOM_S, "the supervisor's own limits come first"
    assert child.num_kills == 1


def test_machine_without_such_a_sandbox_is_said_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, exits: list[Any]
) -> None:
    judges, child = judges_of(monkeypatch, {"missing": "no Landlock"})
    with pytest.raises(NoSandbox, match="no Landlock"):
        judges.start()
    assert child.num_waits == 1
    assert exits == []


def test_supervisor_that_cannot_be_started_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no memory")

    pair = socket.socketpair()
    monkeypatch.setattr("socket.socketpair", lambda: pair)
    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(JudgeLost, match="the code sandbox cannot be started: no memory"):
        Judges("limits").start()
    assert [end.fileno() for end in pair] == [-1, -1]


# ---------------------------------------------------------------- the scorer


class FakeJudges:
    """Answers `outcome`; remembers the task."""

    outcome: dict[str, Any]
    tasks: list[Task]

    def __init__(self, required: str, python: str, allowed: tuple[str, ...]) -> None:
        self.asked = (required, python, allowed)
        self.layer, self.words = "landlock", "landlock works"

    def start(self) -> None:
        if self.asked[0] == "namespaces":
            raise NoSandbox("no user namespaces")

    def judge(self, task: Task) -> dict[str, Any]:
        FakeJudges.tasks.append(task)
        return FakeJudges.outcome


FOUND = {"num_tests": 4, "num_passed": 4, "failures": [], "weaker": []}
ROW: dict[str, Any] = {"tests": ["assert f(1) == 1"]}


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(programs, "Judges", FakeJudges)
    FakeJudges.outcome, FakeJudges.tasks = FOUND, []

    def run(outcome: dict[str, Any] = FOUND, response: str = "def f(x): return x", row: Any = ROW,
            finish_reason: str = "stop", **options: Any) -> Any:  # fmt: skip
        FakeJudges.outcome = {**FOUND, **outcome}
        scorer = CodeScorer(CodeOptions.model_validate(options))
        assert scorer.version == "2/landlock"
        return scorer.score(ScorerInput(row=row, response=response, finish_reason=finish_reason, num_tokens=1))

    return run


@pytest.mark.parametrize(
    ("found", "value", "share"),
    [
        ({}, 1.0, 1.0), ({"num_passed": 3, "failures": ["test 2: x"]}, 0.0, 0.75), ({"failures": ["x"]}, 0.0, 1.0),
        ({"num_passed": 9}, 0.0, 1.0), ({"num_passed": 0}, 0.0, 0.0),
    ],
)  # fmt: skip
def test_value_is_all_or_nothing_or_with_partial_credit_the_share(
    found: dict[str, Any], value: float, share: float, score: Any
) -> None:
    assert {key: score(found)[key] for key in ("value", "correct", "passed")} == {
        "value": value, "correct": value, "passed": share
    }  # fmt: skip
    assert score(found, partial_credit=True)["value"] == share


def test_remark_tells_the_failures_in_printable_words(score: Any) -> None:
    remark = score({"num_passed": 1, "failures": ["test 1: a\x1b[31m", "test 2: b"]})["remark"]
    assert remark == "test 1: a?[31m; test 2: b"
    assert len(score({"num_passed": 1, "failures": ["x" * 1000]})["remark"]) == programs.MAX_REMARK_CHARS


def test_own_classes_that_decided_are_a_remark_or_no_verdict(score: Any) -> None:
    found = {"weaker": ["V", "W"]}
    values = score(found)
    assert (values["weaker"], values["remark"]) == (
        1.0, "weaker mode: the verdict depends on objects of the program's own types (V, W)"
    )  # fmt: skip
    assert "weaker" not in score()
    with pytest.raises(CannotJudge, match=r"the program's own classes \(V, W\)"):
        score(found, own_classes="invalid")


def test_what_is_no_programs_fault_has_no_value(score: Any) -> None:
    with pytest.raises(CannotJudge, match="a test cannot be run"):
        score({"unjudgeable": "a test cannot be run"})
    with pytest.raises(SandboxBroke, match="bubblewrap is gone"):
        score({"failed": "bubblewrap is gone"})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response": " "}, "the answer contains no program"),
        ({"response": " ", "extract": "whole"}, "the answer contains no program"),
        ({"response": "x = 1234", "max_program_chars": 7}, "the program is longer than 7 characters"),
        ({"finish_reason": "length", "must_stop": True}, "the answer was truncated at the token limit"),
    ],
)
def test_answer_without_a_usable_program_is_wrong_and_nobody_is_asked(
    more: dict[str, Any], words: str, score: Any
) -> None:
    assert score(**more) == {"value": 0.0, "correct": 0.0, "passed": 0.0, "remark": words}
    assert FakeJudges.tasks == []


def test_program_of_just_the_longest_length_or_cut_by_chance_is_judged(score: Any) -> None:
    assert score(response="x = 1234", max_program_chars=8)["value"] == 1.0
    assert score(finish_reason="length")["value"] == 1.0


def test_task_has_the_options_limits_and_a_row_may_ask_for_its_own_within_them(score: Any) -> None:
    options = {
        "time_limit_s": 3.0, "total_limit_s": 5.0, "memory_limit_mb": 100, "max_memory_limit_mb": 200,
        "max_processes": 7,
        "max_file_mb": 8, "max_open_files": 20, "tmp_mb": 9, "max_output_kb": 10, "partial_credit": True,
        "float_tolerance": 0.25, "compare": "lines",
    }  # fmt: skip
    score(**options)
    score(row={**ROW, "time_limit_s": 4.0, "memory_limit_mb": 150}, **options)
    score(row={**ROW, "time_limit_s": 9.0, "memory_limit_mb": 900}, **options)
    first, second, third = FakeJudges.tasks
    assert first.limits == {
        "time_s": 3.0, "memory_bytes": 100 << 20, "max_tasks": 7, "max_file_bytes": 8 << 20, "max_open_files": 20,
        "tmp_bytes": 9 << 20, "max_output_bytes": 10 << 10,
    }  # fmt: skip
    assert (first.total_limit_s, first.partial_credit, first.float_tolerance, first.compare) == (
        5.0,
        True,
        0.25,
        "lines",
    )
    assert (second.limits["time_s"], second.limits["memory_bytes"]) == (4.0, 150 << 20)
    assert (third.limits["time_s"], third.limits["memory_bytes"]) == (5.0, 200 << 20)


def test_program_in_the_row_is_judged_as_it_is_where_the_answer_is_that_or_nothing(score: Any) -> None:
    given = "Sure:\n```python\nx = 1\n```"
    for response in ("", given):
        score(response=response, row={**ROW, "program": given})
        assert FakeJudges.tasks[-1].program == given
    score(response="```python\ny = 2\n```", row={**ROW, "program": given})
    assert FakeJudges.tasks[-1].program.strip() == "y = 2"
    score(response="```python\ny = 2\n```", extract="whole")
    assert FakeJudges.tasks[-1].program == "```python\ny = 2\n```"


def test_layer_and_interpreter_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "Judges", FakeJudges)
    for options, asked in (
        ({}, ("landlock", "", ())),
        ({"require": "limits", "layer": "seccomp", "python": "/py"}, ("limits", "/py", ("seccomp",))),
    ):
        scorer: Any = CodeScorer(CodeOptions.model_validate(options))
        assert scorer._judges.asked == asked
    with pytest.raises(
        UserError, match="no sandbox layer as strong as `namespaces` works on this machine: no user namespaces"
    ):
        CodeScorer(CodeOptions.model_validate({"require": "namespaces"}))


def test_layer_in_use_is_logged_on_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(programs, "Judges", FakeJudges)
    CodeScorer(CodeOptions())
    assert capsys.readouterr().err == "programs run in the sandbox layer landlock: landlock works\n"
