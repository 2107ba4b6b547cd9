"""Claims about messages with a process in a sandbox, and about who is to blame when one side ends; no sandbox here."""

from __future__ import annotations

import json
import math
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.reward.judging import exchange as exchange_module
from services.reward.judging import judge as module
from services.reward.judging.exchange import Exchange, Over
from services.reward.judging.judge import END_ROOM_S, MAX_REQUEST_BYTES, _Mediation, _TestsStopped
from services.reward.judging.problem import Asserts, Findings, Task, Unjudgeable
from services.reward.sandbox.cell import SandboxFailed
from services.reward.sandbox.deadline import TESTS_ROOM_S, Deadline
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Stopped
from tests.open_descriptors import no_new_descriptors

LIMIT_S = 300.0
LIMITS = Limits(max_output_bytes=4096)


class Cell:
    """Takes the process's end of the channel; `steps` are what the process does when it is waited for."""

    def __init__(self, *steps: Callable[[Cell], int | None]) -> None:
        self.steps = list(steps)
        self.begun: list[str] = []
        self.error: Exception | None = None

    def begin(self, mode: str, fds: list[int]) -> None:
        if self.error is not None:
            raise self.error
        self.begun.append(mode)
        assert len(fds) == 4
        assert os.fstat(fds[0]) == os.fstat(fds[1]) == os.fstat(fds[2]) == os.stat(os.devnull)
        self.channel = socket.socket(fileno=os.dup(fds[3]))


class Run:
    """The run of a Cell: plays the process's next step where there is nothing to be read or written yet."""

    def __init__(self, cell: Cell, limits: Limits, deadline: Deadline, room_s: float) -> None:
        self.cell, self.limits, self.deadline, self.room_s = cell, limits, deadline, room_s
        self.status: int | None = None
        self.is_settled = False

    def settle(self) -> None:
        self.is_settled = True

    def wait(self, fds: dict[int, int]) -> dict[int, int]:
        poll = select.poll()
        for fd, event in fds.items():
            poll.register(fd, event)
        if happened := dict(poll.poll(0 if self.cell.steps else LIMIT_S * 1000)):
            return happened
        self.status = self.cell.steps.pop(0)(self.cell)
        return dict(poll.poll(0)) if self.status is None else {}


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "Run", Run)
    monkeypatch.setattr(exchange_module, "_LAST_WORDS_S", 0.0)


def opened(*steps: Callable[[Cell], int | None]) -> tuple[Exchange, Cell]:
    cell = Cell(*steps)
    deadline = Deadline(77.0)
    made: Any = Exchange(cell, "calls", LIMITS, deadline, 0.5)  # type: ignore[arg-type]
    assert (cell.begun, made.run.deadline, made.run.room_s, made.run.limits) == (["calls"], deadline, 0.5, LIMITS)
    return made, cell


def says(body: bytes) -> Callable[[Cell], None]:
    return lambda cell: cell.channel.sendall(body)


def ends(status: int = 0, last_words: bytes = b"") -> Callable[[Cell], int]:
    def end(cell: Cell) -> int:
        if last_words:
            cell.channel.sendall(last_words)
        cell.channel.close()
        return status

    return end


def stops(cell: Cell) -> None:
    raise Stopped("time limit of 3 s")


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def read_all(channel: socket.socket, num_bytes: int, into: bytearray) -> None:
    while len(into) < num_bytes:
        into += channel.recv(1 << 16)


def test_message_has_its_length_in_front_both_ways() -> None:
    exchange, cell = opened(says(framed(b"yes")[:2]), says(framed(b"yes")[2:5]), says(framed(b"yes")[5:]))
    exchange.send(b"really?")
    assert cell.channel.recv(100) == b"\x00\x00\x00\x07really?"
    assert exchange.receive() == b"yes"
    exchange.close()
    assert cell.channel.recv(1) == b"", "our end is closed"
    assert exchange.run.is_settled  # type: ignore[attr-defined]


def test_message_larger_than_the_channel_holds_arrives_whole() -> None:
    exchange, cell = opened()
    body, found = bytes(range(256)) * 4000, bytearray()
    reader = threading.Thread(target=read_all, args=(cell.channel, len(body) + 4, found))
    reader.start()
    exchange.send(body)
    reader.join()
    assert bytes(found) == framed(body)


def test_answer_may_be_as_long_as_the_limit_and_no_longer() -> None:
    exchange, _ = opened(says(framed(b"x" * 4096)))
    assert exchange.receive() == b"x" * 4096
    exchange, _ = opened(says(framed(b"x" * 4097)))
    with pytest.raises(Over, match="its reply is longer than 4 kB") as raised:
        exchange.receive()
    assert not raised.value.is_stopped


def test_what_nobody_asked_for_is_seen_and_stays() -> None:
    exchange, cell = opened()
    assert exchange.has_unread() is False
    cell.channel.sendall(framed(b"early"))
    assert exchange.has_unread() is True
    assert exchange.receive() == b"early"


def test_process_that_is_stopped_says_at_which_limit() -> None:
    for act in (Exchange.receive, lambda exchange: exchange._wait(select.POLLPRI)):
        with pytest.raises(Over, match="time limit of 3 s") as raised:
            act(opened(stops)[0])
        assert raised.value.is_stopped


def test_process_that_ends_says_how_and_its_last_words_count() -> None:
    with pytest.raises(Over, match=r"it ended early \(exit status 3\)") as raised:
        opened(ends(3 << 8))[0].receive()
    assert not raised.value.is_stopped
    exchange, _ = opened(ends(0, framed(b"last")))
    assert exchange.receive() == b"last"
    with pytest.raises(Over, match=r"it ended early \(exit status 0\)"):
        exchange.receive()


def test_process_that_ends_without_reading_on_says_how_whatever_it_wrote() -> None:
    exchange, _ = opened(ends(3 << 8, b"unasked"))
    with pytest.raises(Over, match=r"it ended early \(exit status 3\)"):
        exchange.send(bytes(1 << 22))


def test_process_that_closes_its_connection_and_lives_on_is_over() -> None:
    exchange, cell = opened()
    cell.channel.close()
    with pytest.raises(Over, match="it closed its connection"):
        exchange.receive()
    with pytest.raises(Over, match="it closed its connection"):
        exchange.send(b"x")


def test_process_whose_channel_closes_a_moment_before_it_ends_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_LAST_WORDS_S", math.inf)
    for step, words, is_stopped in ((ends(1 << 8), "exit status 1", False), (stops, "time limit", True)):
        exchange, cell = opened(lambda cell: None, step)
        cell.channel.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Over, match=words) as raised:
            exchange.receive()
        assert raised.value.is_stopped is is_stopped


def test_sandbox_that_cannot_begin_leaves_no_descriptor() -> None:
    cell = Cell()
    cell.error = SandboxFailed("broke")
    with no_new_descriptors(), pytest.raises(SandboxFailed, match="broke"):
        Exchange(cell, "calls", LIMITS, Deadline(1.0))  # type: ignore[arg-type]


# ---------------------------------------------------------------- between tests and program


class Played:
    """An exchange whose messages are scripted: bytes, or an Over to be raised."""

    def __init__(self, cell: Any, mode: str, limits: Limits, deadline: Deadline, room_s: float = 0.0) -> None:
        self.script: list[Any] = cell.scripts.pop(0)
        self.mode, self.limits, self.deadline, self.room_s = mode, limits, deadline, room_s
        self.sent: list[bytes] = []
        self.is_closed = False
        self.unread = False
        self.run = self
        self.status: int | None = None
        self.stopped = ""
        cell.exchanges.append(self)

    def send(self, body: bytes) -> None:
        self.sent.append(body)

    def receive(self) -> bytes:
        found = self.script.pop(0)
        if isinstance(found, Over):
            raise found
        if callable(found):
            found = found()
        assert isinstance(found, bytes)
        return found

    def has_unread(self) -> bool:
        return self.unread

    def wait(self, fds: dict[int, int]) -> dict[int, int]:
        assert fds == {}
        if self.stopped:
            raise Stopped(self.stopped)
        self.status = 0
        return {}

    def close(self) -> None:
        self.is_closed = True


class PlayedCell:
    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.exchanges: list[Played] = []
        self.is_ready = self.is_closed = False

    def wait_ready(self) -> None:
        self.is_ready = True

    def close(self) -> None:
        self.is_closed = True


class Scene:
    """One judgement by scripts: what the tests' process says, and what each process of the program does."""

    def __init__(self, tests: list[Any], *programs: list[Any], total_s: float = 50.0) -> None:
        self.tests_cell = PlayedCell(tests)
        self.program_cells = [PlayedCell(script) for script in programs]
        self._unopened = list(self.program_cells)
        self.deadline = Deadline(total_s)
        task = Task("p", Asserts(("assert f()",), entry_point="f"), LIMITS.as_dict(), total_s, True, 0.25)
        assert isinstance(task.problem, Asserts)
        self.mediation = _Mediation(
            task, task.problem, self, self.tests_cell, b"p", LIMITS, self.deadline  # type: ignore[arg-type]
        )  # fmt: skip

    def open(self, source: bytes, limits: Limits) -> PlayedCell:
        assert (source, limits) == (b"p", LIMITS)
        return self._unopened.pop(0)

    @property
    def tests(self) -> Played:
        return self.tests_cell.exchanges[0]

    def program(self, number: int = 0) -> Played:
        return self.program_cells[number].exchanges[0]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Exchange", Played)


FOUND = Findings(num_tests=1, num_passed=1)
END = b"f" + json.dumps(FOUND.as_dict()).encode()


def test_requests_of_tests_go_to_the_program_and_its_answers_come_back_unread() -> None:
    scene = Scene([b"o", b"aone", b"atwo", END], [b"hello", b"\xff1", b"2"])
    assert scene.mediation.run() == FOUND.as_dict()
    first, *answers = scene.tests.sent
    assert first[:1] == b"t"
    assert json.loads(first[1:]) == {
        "problem": {"tests": ["assert f()"], "setup": "", "is_check_function": False, "entry_point": "f", "prompt": "",
                    "reference": ""},
        "partial_credit": True, "float_tolerance": 0.25,
    }  # fmt: skip
    assert answers == [b"mhello", b"m\xff1", b"m2"]
    program = scene.program()
    assert (program.mode, program.limits, program.deadline, program.room_s) == ("calls", LIMITS, scene.deadline, 0.0)
    assert program.sent == [b"one", b"two"]
    assert (scene.program_cells[0].is_ready, scene.program_cells[0].is_closed, program.is_closed) == (True, True, True)
    assert scene.tests.is_closed
    assert not scene.tests_cell.is_closed, "the next program's tests are forked from it"


def test_tests_have_their_programs_time_and_some_room_and_may_send_long_requests() -> None:
    starts: list[bool] = []

    def look() -> bytes:
        starts.append(scene.deadline.until_s < math.inf)
        return b"o" if len(starts) == 1 else END

    scene = Scene([look, look], [b"hello"])
    scene.mediation.run()
    assert scene.tests.limits.time_s == 50.0 + TESTS_ROOM_S
    assert scene.tests.limits.max_output_bytes == MAX_REQUEST_BYTES
    assert scene.tests.deadline is scene.deadline, "both together have the time of one program"
    assert starts == [False, True], "its clock starts when the program can run"
    assert scene.tests.room_s == TESTS_ROOM_S + END_ROOM_S, "whose time is up may still end"


def test_new_process_of_the_program_takes_the_place_of_the_one_before() -> None:
    scene = Scene([b"o", b"o", b"ax", END], [b"first"], [b"second", b"1"])
    scene.mediation.run()
    assert scene.tests.sent[1:] == [b"mfirst", b"msecond", b"m1"]
    assert scene.program(0).is_closed
    assert scene.program_cells[0].is_closed
    assert scene.program(1).sent == [b"x"]


def test_no_process_of_a_program_begins_after_its_time() -> None:
    def late() -> bytes:
        scene.deadline.spent_s = 50.1
        return b"o"

    scene = Scene([b"o", late, END], [b"first"])
    scene.mediation.run()
    assert scene.tests.sent[1:] == [b"mfirst", b"n"]


def test_program_that_is_over_says_why_to_this_and_every_later_question_until_a_new_one_begins() -> None:
    scene = Scene([b"o", b"a1", b"a2", b"o", b"a3", END], [b"hi", Over("it ended early")], [b"new", b"3"])
    scene.mediation.run()
    assert scene.tests.sent[1:] == [b"mhi", b"xit ended early", b"xit ended early", b"mnew", b"m3"]
    assert scene.program(0).sent == [b"1"], "nobody asks it again"


def test_program_that_does_not_come_up_says_why() -> None:
    scene = Scene([b"o", b"a1", END], [Over("exit status 1")])
    scene.mediation.run()
    assert scene.tests.sent[1:] == [b"xexit status 1", b"xexit status 1"]


def test_program_that_answers_before_it_was_asked_is_over() -> None:
    def unasked() -> bytes:
        scene.program().unread = True
        return b"a1"

    scene = Scene([b"o", unasked, END], [b"hi"])
    scene.mediation.run()
    assert scene.tests.sent[1:] == [b"mhi", b"xit replied before it received a request"]
    assert scene.program().sent == []


@pytest.mark.parametrize("message", [b"q", b"", b"a1"])
def test_tests_that_break_the_protocol_judge_nobody(message: bytes) -> None:
    """A question before there is a program is one of them."""
    scene = Scene([message])
    scene.program_cells.append(PlayedCell())
    scene._unopened.append(scene.program_cells[0])
    with pytest.raises(_TestsStopped) as raised:
        scene.mediation.run()
    assert raised.value.answer == {
        "unjudgeable": "the tests did not run to their end: it broke the protocol of the judge"
    }
    assert scene.program_cells[0].is_closed
    assert scene.tests.is_closed


@pytest.mark.parametrize(
    ("over", "has_program", "is_programs_fault"),
    [
        (Over("time limit of 51 s", is_stopped=True), True, True), (Over("killed by signal SIGSEGV"), True, True),
        (Over("it ended early (exit status 1)"), True, False), (Over("it closed its connection"), True, False),
        (Over("time limit of 51 s", is_stopped=True), False, False), (Over("killed by signal SIGABRT"), False, False),
    ],
)  # fmt: skip
def test_tests_that_do_not_end_with_a_programs_answers_are_its_fault_alone(
    over: Over, has_program: bool, is_programs_fault: bool
) -> None:
    scene = Scene([*([b"o"] if has_program else []), over], [b"hi"])
    with pytest.raises(_TestsStopped) as raised:
        scene.mediation.run()
    how = f"the tests did not end normally after the replies of the program ({over.why})"
    assert raised.value.answer == (
        Findings(num_tests=1, failures=[how]).as_dict() if is_programs_fault
        else {"unjudgeable": f"the tests did not run to their end: {over.why}"}
    )  # fmt: skip


def test_tests_that_report_and_do_not_end_judge_nobody() -> None:
    def stay() -> bytes:
        scene.tests.stopped = "time limit"
        return END

    scene = Scene([stay], [b"hi"])
    with pytest.raises(_TestsStopped) as raised:
        scene.mediation.run()
    assert raised.value.answer == {"unjudgeable": "the tests did not run to their end: time limit"}


def test_tests_that_cannot_be_used_are_said_so() -> None:
    scene = Scene([b'f{"unjudgeable": "no Python"}'], [b"hi"])
    with pytest.raises(Unjudgeable, match="no Python"):
        scene.mediation.run()
    assert scene.program_cells[0].is_closed
