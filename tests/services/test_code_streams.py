"""Claims about judging by input and output, with sandbox and runs played: which tests run, where, and what is kept."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import pytest

from services.reward.judging import judge as judge_module
from services.reward.judging import streams as module
from services.reward.judging.exchange import Over
from services.reward.judging.judge import MAX_FINDINGS_BYTES, MAX_WORD_CHARS, Judge, _read_findings
from services.reward.judging.problem import MAX_FAILURES, Findings, Streams, Task, Unjudgeable
from services.reward.judging.streams import ERROR_TAIL_BYTES, Conditions, Output, judge_streams
from services.reward.sandbox.cell import SandboxFailed
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Stopped
from tests.open_descriptors import no_new_descriptors

LIMITS = Limits(max_output_bytes=4096)


class Cell:
    def __init__(self, is_repeated: bool) -> None:
        self.is_repeated, self.is_ready, self.num_closed = is_repeated, False, 0
        self.programs: list[str] = []

    def wait_ready(self) -> None:
        self.is_ready = True

    def begin(self, mode: str, fds: list[int]) -> None:
        assert (mode, self.is_ready, self.num_closed) == ("script", True, 0)
        self.stdin, self.stdout, self.stderr = (os.dup(fd) for fd in fds)

    def close(self) -> None:
        self.num_closed += 1


class Sandbox:
    def __init__(self, has_fresh_runs: bool) -> None:
        self.has_fresh_runs = has_fresh_runs
        self.cells: list[Cell] = []

    def open(self, source: bytes, limits: Limits, *, is_repeated: bool) -> Cell:
        assert source == b"program"
        self.cells.append(Cell(is_repeated))
        return self.cells[-1]


class Run:
    """Plays the program: echoes its input, or does what the input says."""

    def __init__(self, cell: Cell, limits: Limits, deadline: Deadline) -> None:
        self.cell, self.status = cell, None
        self.deadline = deadline

    def wait(self, fds: dict[int, int]) -> dict[int, int]:
        cell = self.cell
        if not cell.programs or cell.programs[-1] != "running":
            os.lseek(cell.stdin, 0, os.SEEK_SET)
            self.given = os.read(cell.stdin, 1 << 16).decode()
            cell.programs.append("running")
            if self.given == "stop":
                for fd in (cell.stdin, cell.stdout, cell.stderr):
                    os.close(fd)
                raise Stopped("time limit of 3 s")
            os.write(cell.stdout, self.given.encode())
            if self.given == "die":
                os.write(cell.stderr, b"Traceback\n  in x\nValueError: no\n")
            if self.given == "flood":
                os.write(cell.stdout, b"x" * LIMITS.max_output_bytes)
            for fd in (cell.stdin, cell.stdout, cell.stderr):
                os.close(fd)
            return dict.fromkeys(fds, select.POLLIN)
        cell.programs[-1] = self.given
        self.status: int | None = 3 << 8 if self.given == "die" else signal.SIGSEGV if self.given == "segv" else 0
        return {}


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Run", Run)


def judged(
    *tests: tuple[str, str], partial_credit: bool = False, has_fresh_runs: bool = True, total_s: float = 100.0
) -> tuple[Findings, Sandbox]:
    sandbox: Any = Sandbox(has_fresh_runs)
    conditions = Conditions(sandbox, b"program", LIMITS, Deadline(total_s), partial_credit, "tokens", 0.0)
    with no_new_descriptors():
        findings = judge_streams(Streams(tests), conditions)
    assert all(cell.num_closed == 1 for cell in sandbox.cells), "nothing stays behind"
    return findings, sandbox


def test_program_that_prints_what_is_expected_passes() -> None:
    findings, sandbox = judged(("1", "1"), ("2", "2"))
    assert (findings.num_tests, findings.num_passed, findings.failures) == (2, 2, [])
    assert [cell.programs for cell in sandbox.cells] == [["1", "2"]], "one sandbox whose runs are apart"
    assert sandbox.cells[0].is_repeated
    assert not judged(("1", "1"))[1].cells[0].is_repeated


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("2", "wrong output"), ("die", "exit status 3: ValueError: no"), ("segv", "killed by signal SIGSEGV"),
        ("stop", "time limit of 3 s"), ("flood", "output limit of 4 kB"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("partial_credit", [False, True])
def test_first_failure_ends_it_unless_the_share_counts(given: str, why: str, partial_credit: bool) -> None:
    findings, _ = judged(("1", "1"), (given, "9"), ("3", "3"), partial_credit=partial_credit)
    assert findings.failures == [f"test 2: {why}"]
    assert (findings.num_tests, findings.num_passed) == (3, 2 if partial_credit else 1)


def test_sandbox_is_replaced_after_every_test_where_runs_are_not_apart_and_after_one_that_was_stopped() -> None:
    _, sandbox = judged(("1", "1"), ("2", "2"), has_fresh_runs=False)
    assert [cell.programs for cell in sandbox.cells] == [["1"], ["2"]]
    _, sandbox = judged(("1", "1"), ("stop", ""), ("3", "3"), ("4", "4"), partial_credit=True)
    assert [cell.programs for cell in sandbox.cells] == [["1", "running"], ["3", "4"]]


def test_no_test_begins_after_the_time_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Run):
        def wait(self, fds: dict[int, int]) -> dict[int, int]:
            self.deadline.spent_s += 3.0  # two waits a run
            return super().wait(fds)

    monkeypatch.setattr(module, "Run", Slow)
    findings, _ = judged(("1", "1"), ("2", "2"), ("3", "3"), partial_credit=True, total_s=10.0)
    assert (findings.num_passed, findings.failures) == (2, ["test 3: time limit of all its tests together"])


# ---------------------------------------------------------------- what a run prints


def test_both_streams_share_one_bound_and_of_errors_the_end_is_kept() -> None:
    output = Output(1000)
    os.write(output.write_fd, b"x" * 500)
    os.write(output.errors_write_fd, b"a" * 100 + b"b" * 400)
    assert output.interest() == {output.read_fd: select.POLLIN, output.errors_fd: select.POLLIN}
    output.close_theirs()
    output.take_rest()
    assert bytes(output.printed) == b"x" * 500
    assert output.errors == b"b" * ERROR_TAIL_BYTES
    assert output.interest() == {}, "both are at their end"
    output.close()


def test_one_byte_more_than_the_bound_is_too_much() -> None:
    output = Output(2048)
    os.write(output.write_fd, b"x" * 2048)
    output.take(output.read_fd)
    output.take(output.read_fd)  # nothing there: no harm
    os.write(output.errors_write_fd, b"x")
    with pytest.raises(Stopped, match="output limit of 2 kB"):
        output.take_rest()
    output.close_theirs()
    output.close()


def test_rest_of_a_stream_that_a_child_holds_open_is_not_waited_for() -> None:
    output = Output(1000)
    os.write(output.write_fd, b"rest")
    output.take_rest()
    assert bytes(output.printed) == b"rest"
    output.close_theirs()
    output.close()


@pytest.mark.parametrize(
    ("errors", "words"), [(b"", ""), (b" \n", ""), (b"a\nlast \n\n", ": last"), (b"\xff", ": \ufffd"),
                          (b"x" * 500, ": " + "x" * 120)]
)  # fmt: skip
def test_last_line_of_errors_tells_what_went_wrong(errors: bytes, words: str) -> None:
    assert module._last_line(errors) == words


# ---------------------------------------------------------------- what a process of tests reports


def findings_of(**changes: Any) -> bytes:
    import json

    return json.dumps({**Findings(3, 2, ["a"], {"W", "V"}, True).as_dict(), **changes}).encode()


def test_findings_are_taken_as_they_are_within_their_bounds() -> None:
    assert _read_findings(findings_of()) == {
        "num_tests": 3, "num_passed": 2, "failures": ["a"], "weaker": ["V", "W"], "uses_helpers": True
    }  # fmt: skip
    many = _read_findings(findings_of(failures=["x"] * 9))
    assert many["failures"] == ["x"] * MAX_FAILURES
    assert _read_findings(findings_of(failures=["x" * MAX_WORD_CHARS]))["failures"] == ["x" * MAX_WORD_CHARS]
    assert _read_findings(findings_of(num_tests=(1 << 31) - 1, num_passed=0))["num_passed"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tests": 1 << 31}, {"num_tests": -1}, {"num_passed": -1}, {"num_tests": True}, {"num_passed": 2.0},
        {"failures": "a"}, {"failures": [1]}, {"failures": ["x" * (MAX_WORD_CHARS + 1)]}, {"weaker": None},
        {"weaker": [["V"]]}, {"uses_helpers": 1}, {"uses_helpers": None},
    ],
)  # fmt: skip
def test_findings_of_another_form_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(Over, match="it reported no findings"):
        _read_findings(findings_of(**changes))


def test_findings_that_are_too_long_are_not_read() -> None:
    body = findings_of()
    _read_findings(body + b" " * (MAX_FINDINGS_BYTES - len(body)))
    with pytest.raises(Over):
        _read_findings(body + b" " * (MAX_FINDINGS_BYTES - len(body) + 1))
    with pytest.raises(Unjudgeable) as raised:
        _read_findings(b'{"unjudgeable": "' + b"y" * 2000 + b'"}')
    assert len(str(raised.value)) == MAX_WORD_CHARS


# ---------------------------------------------------------------- the judge


class TestsCell:
    pid = 55

    def __init__(self) -> None:
        self.is_ready, self.num_closed = False, 0

    def wait_ready(self) -> None:
        self.is_ready = True

    def close(self) -> None:
        self.num_closed += 1


TestsCell.__test__ = False  # type: ignore[attr-defined]


def test_cell_for_tests_is_started_once_known_by_its_number_and_replaced_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells: list[TestsCell] = []

    class Opening:
        def open_tests(self) -> TestsCell:
            cells.append(TestsCell())
            return cells[-1]

    results: list[Any] = [
        {"num_tests": 1},
        SandboxFailed("bubblewrap is gone"),
        Unjudgeable("no Python"),
        {"num_tests": 2},
    ]

    class Mediation:
        def __init__(
            self, task: Any, problem: Any, sandbox: Any, tests: Any, source: bytes, limits: Any, clock: Any
        ) -> None:
            assert tests is cells[-1]
            assert (source, limits, clock.total_s) == ("é".encode(), Limits(), 7.0)

        def run(self) -> Any:
            result = results.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

    monkeypatch.setattr(judge_module, "_Mediation", Mediation)
    judge = Judge(Opening())  # type: ignore[arg-type]
    assert judge.pids == set()
    task = Task("é", judge_module.Asserts(("assert 1",)), Limits().as_dict(), 7.0)
    assert judge.judge(task) == {"num_tests": 1}
    assert (len(cells), cells[0].is_ready, judge.pids) == (1, True, {55})
    assert judge.judge(task) == {"failed": "bubblewrap is gone"}
    assert (cells[0].num_closed, judge.pids) == (1, set())
    assert judge.judge(task) == {"unjudgeable": "no Python"}
    assert judge.judge(task) == {"num_tests": 2}
    assert len(cells) == 2, "tests that cannot be used cost no cell"
    judge.close()
    judge.close()
    assert cells[1].num_closed == 1


def test_tests_that_had_to_be_stopped_give_their_answer_and_cost_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mediation:
        def __init__(self, *_: Any) -> None: ...

        def run(self) -> Any:
            raise judge_module._TestsStopped({"unjudgeable": "the tests did not run to their end"})

    monkeypatch.setattr(judge_module, "_Mediation", Mediation)
    cell = TestsCell()

    class Opening:
        def open_tests(self) -> TestsCell:
            return cell

    judge = Judge(Opening())  # type: ignore[arg-type]
    answer = judge.judge(Task("", judge_module.Asserts(("assert 1",)), Limits().as_dict(), 7.0))
    assert answer == {"unjudgeable": "the tests did not run to their end"}
    assert cell.num_closed == 1


def test_program_judged_by_its_output_needs_no_cell_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def judge_streams(problem: Streams, conditions: Conditions) -> Findings:
        seen.append((problem, conditions))
        return Findings(1, 1)

    monkeypatch.setattr(judge_module.streams, "judge_streams", judge_streams)
    task = Task("p", Streams((("1", "1"),)), Limits().as_dict(), 7.0, True, 0.25, "lines")
    assert Judge(object()).judge(task)["num_passed"] == 1  # type: ignore[arg-type]
    ((problem, conditions),) = seen
    assert problem is task.problem
    assert (conditions.source, conditions.limits, conditions.deadline.total_s) == (b"p", Limits(), 7.0)
    assert (conditions.partial_credit, conditions.compare, conditions.float_tolerance) == (True, "lines", 0.25)
