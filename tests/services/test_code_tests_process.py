"""Claims about the process in which tests run, played in this one: what it asks the judge for and what it reports."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from program_here import ProgramHere

from services.reward.judging import tests_process
from services.reward.judging.problem import Asserts, Task
from services.reward.judging.program import LateProgram, ProgramOver
from services.reward.judging.tests_process import Judge

LIMIT_S = 300.0


class Ended(BaseException):
    """`os._exit` was called."""


@pytest.fixture
def ends() -> Iterator[tuple[Judge, Outside]]:
    """The tests' end of a channel, and the judge's."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.settimeout(LIMIT_S)
    yield Judge(theirs), Outside(ours)
    ours.close()
    theirs.close()


class Outside:
    """The judge's end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    def say(self, message: bytes) -> None:
        self.channel.sendall(len(message).to_bytes(4, "big") + message)

    def received(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, num_bytes: int) -> bytes:
        found = b""
        while len(found) < num_bytes:
            chunk = self.channel.recv(num_bytes - len(found))
            assert chunk
            found += chunk
        return found


def test_new_process_of_the_program_is_one_letter_and_a_question_has_another(ends: Any) -> None:
    judge, outside = ends
    outside.say(b"mfirst")
    assert judge.open_program() == b"first"
    assert outside.received() == b"o"
    outside.say(b"manswer")
    assert judge.ask_program(b"question") == b"answer"
    assert outside.received() == b"aquestion"


def test_answer_of_megabytes_arrives_whole(ends: Any) -> None:
    judge, outside = ends
    saying = threading.Thread(target=outside.say, args=(b"m" + b"x" * 3_000_000,))
    saying.start()
    assert judge.ask_program(b"q") == b"x" * 3_000_000
    saying.join(LIMIT_S)


def test_program_that_is_over_says_why_and_a_late_one_is_late(ends: Any) -> None:
    judge, outside = ends
    outside.say(b"xtime limit")
    with pytest.raises(ProgramOver, match="time limit"):
        judge.ask_program(b"q")
    outside.say(b"n")
    with pytest.raises(LateProgram):
        judge.open_program()


def test_process_ends_with_the_judge(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, outside = ends
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    outside.channel.sendall(b"\0\0\0\x09half")
    outside.channel.shutdown(socket.SHUT_WR)
    with pytest.raises(Ended):
        judge.tests()
    assert statuses == [1]


def served(problem: Asserts, program: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[dict[str, Any], Any]:
    """What the process of tests reports about a program, and what `sys.argv` was to the tests."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    outside, source = Outside(ours), ProgramHere(program)
    found: dict[str, Any] = {}

    def judge() -> None:
        task = Task("", problem, {}, 1.0, **more)
        outside.say(b"t" + json.dumps(task.as_dict()).encode())
        while (message := outside.received())[:1] != b"f":
            answer = source.open_program() if message[:1] == b"o" else source.ask_program(message[1:])
            outside.say(b"m" + answer)
        found.update(json.loads(message[1:]))

    judging = threading.Thread(target=judge)
    judging.start()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        raise Ended

    depth, arguments = sys.getrecursionlimit(), list(sys.argv)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "_exit", end)
            with pytest.raises(Ended):
                tests_process.serve(theirs.detach())
        judging.join(LIMIT_S)
        assert statuses == [0]
        return found, list(sys.argv)
    finally:
        sys.setrecursionlimit(depth)
        sys.argv[:] = arguments
        source.close()
        ours.close()


def test_findings_are_reported_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Asserts(("assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3"))
    found, arguments = served(problem, "def f(x): return x\n", monkeypatch, partial_credit=True)
    assert (found["num_tests"], found["num_passed"]) == (3, 2)
    assert found["failures"] == ["test 2: AssertionError"]
    assert arguments == ["tests.py"], "tests see no arguments of the service"
    found, _ = served(problem, "def f(x): return x\n", monkeypatch)
    assert found["num_passed"] == 1, "without partial credit it ends at the first failure"


def test_tolerance_is_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Asserts(("assert f(1) == 1.001",))
    for tolerance, passed in ((0.0, 0), (0.01, 1)):
        found, _ = served(problem, "def f(x): return x\n", monkeypatch, float_tolerance=tolerance)
        assert found["num_passed"] == passed


def test_tests_that_cannot_be_used_are_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = served(Asserts(("assert f(",)), "def f(x): return x\n", monkeypatch)
    assert found.keys() == {"unjudgeable"}
    assert "SyntaxError" in found["unjudgeable"]


def test_libraries_of_tests_are_there_before_the_first_program(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: steps.append("(collect)"))
    monkeypatch.setattr(gc, "freeze", lambda: steps.append("(freeze)"))
    monkeypatch.setattr("importlib.import_module", steps.append)
    tests_process.prepare()
    assert set(steps) == {*tests_process.PLAIN_MODULES, "(collect)", "(freeze)"}
    assert steps[-2:] == ["(collect)", "(freeze)"], "memory shared with every process of tests"
