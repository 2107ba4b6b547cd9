"""Judges one program: runs the program and its tests, and interprets their results.

Nothing of a row or of a program is executed, compiled or parsed here: both run in separate sandboxes, apart from each
other and from this process, which has the service's environment and user.

    tests that are input and output     compared here, as bytes (streams.py)
    tests that are code                 run in a process of tests (tests_process.py); this process passes its requests
                                        to the program and the replies back, bounded, without interpreting them

Only this process waits, for one of the two at a time, each within the limits of its own run.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from typing import Any

from services.reward.judging import streams
from services.reward.judging.exchange import Exchange, Over
from services.reward.judging.problem import MAX_FAILURES, Asserts, Findings, Printout, Task, Unjudgeable
from services.reward.sandbox.cell import Cell, SandboxFailed
from services.reward.sandbox.deadline import TESTS_ROOM_S, Deadline
from services.reward.sandbox.layers import TESTS_LIMITS, Sandbox
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Stopped

MAX_FINDINGS_BYTES = 1 << 20
MAX_REQUEST_BYTES = 1 << 26
"""Largest request of tests to a program: arguments may be large."""
MAX_WORD_CHARS = 1_000
END_ROOM_S = 5.0
"""Own time in which a process of tests must exit after its last message; it takes milliseconds."""
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
"""Ends of a process of tests that only replies of the program can cause."""


class Judge:
    """Judges programs one after the other. Call `close` at the end."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._tests: Cell | None = None
        """Cell whose first process has imported the modules that tests need, and forks a process for each program's
        tests."""

    def warm_up(self) -> None:
        """Start the cell for tests, so that the first program need not wait for it. Raises SandboxFailed."""
        if self._tests is None:
            self._tests = self._sandbox.open_tests()
            self._tests.wait_ready()

    def judge(self, task: Task) -> dict[str, Any]:
        """Judge a program. Returns `Findings` as a dict, or {"unjudgeable": why} or {"failed": why} if the program is
        not at fault.

        For a `Printout`: {"printed", "errors", "failure"}, as texts.
        """
        limits, deadline = Limits.of(task.limits), Deadline(task.total_limit_s)
        source = task.program.encode("utf-8", "surrogatepass")
        try:
            if isinstance(task.problem, Asserts):
                self.warm_up()
                assert self._tests is not None
                return _Mediation(task, task.problem, self._sandbox, self._tests, source, limits, deadline).run()
            conditions = streams.Conditions(
                self._sandbox, source, limits, deadline, task.partial_credit, task.compare, task.float_tolerance
            )
            if isinstance(task.problem, Printout):
                return streams.printout(conditions)
            return streams.judge_streams(task.problem, conditions).as_dict()
        except Unjudgeable as error:
            return {"unjudgeable": str(error)}
        except SandboxFailed as error:
            self.close()
            return {"failed": str(error)}
        except _TestsStopped as stopped:
            self.close()
            return stopped.answer

    @property
    def pids(self) -> set[int]:
        """Process ids of the cell for tests, which is kept between programs."""
        return {self._tests.pid} if self._tests is not None else set()

    def close(self) -> None:
        """End the cell for tests."""
        if self._tests is not None:
            self._tests.close()
            self._tests = None


class _TestsStopped(Exception):
    """The process of tests had to be stopped, so its cell cannot be used again. `answer`: the result."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer


class _Mediation:
    """Passes messages between the process of a program's tests and the process of the program."""

    def __init__(
        self, task: Task, problem: Asserts, sandbox: Sandbox, tests: Cell, source: bytes, limits: Limits,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        self._task, self._problem, self._sandbox, self._source = task, problem, sandbox, source
        self._limits, self._deadline = limits, deadline
        self._tests_cell = tests
        self._program_cell: Cell | None = None
        self._program: Exchange | None = None
        self._over = ""
        """Why the current process of the program no longer replies."""

    def run(self) -> dict[str, Any]:
        """Run the tests. Raises SandboxFailed, Unjudgeable, _TestsStopped."""
        self._program_cell = self._sandbox.open(self._source, self._limits)  # starts while the tests are prepared
        total_s = self._deadline.total_s + TESTS_ROOM_S
        limits = replace(TESTS_LIMITS, time_s=total_s, max_output_bytes=MAX_REQUEST_BYTES)
        try:
            tests = Exchange(self._tests_cell, "tests", limits, self._deadline, TESTS_ROOM_S)
            with contextlib.closing(tests):
                return self._serve(tests)
        finally:
            self._close_program()

    def _serve(self, tests: Exchange) -> dict[str, Any]:
        fields = {
            "problem": asdict(self._problem),
            "partial_credit": self._task.partial_credit,
            "float_tolerance": self._task.float_tolerance,
        }
        try:
            tests.send(b"t" + json.dumps(fields).encode())
            while True:
                message = tests.receive()
                kind, body = message[:1], message[1:]
                if kind == b"f":
                    _await_end(tests)
                    return _read_findings(body)
                if kind == b"o":
                    tests.send(self._open_program())
                elif kind == b"a" and self._program is not None:
                    tests.send(self._ask_program(self._program, body))
                else:
                    raise Over("it broke the protocol of the judge")
        except Over as over:
            raise _TestsStopped(self._meaning_of(over)) from over

    def _meaning_of(self, over: Over) -> dict[str, Any]:
        """The result for tests that did not finish, because of the program's replies or by themselves."""
        is_crash = any(name in over.why for name in _CRASHES)
        if self._program is not None and (over.is_stopped or is_crash):
            how = f"the tests did not end normally after the replies of the program ({over.why})"
            return Findings(num_tests=1, failures=[how]).as_dict()
        return {"unjudgeable": f"the tests did not run to their end: {over.why}"}

    def _open_program(self) -> bytes:
        """Start a new process of the program; returns its first message, for the tests."""
        if self._deadline.is_over:
            return b"n"
        if self._program is not None:
            self._close_program()
            self._program_cell = self._sandbox.open(self._source, self._limits)
        assert self._program_cell is not None
        self._program_cell.wait_ready()
        self._deadline.start()
        self._over = ""
        self._program = Exchange(self._program_cell, "calls", self._limits, self._deadline)
        try:
            return b"m" + self._program.receive()
        except Over as over:
            self._over = over.why
            return b"x" + over.why.encode()

    def _ask_program(self, program: Exchange, request: bytes) -> bytes:
        try:
            if not self._over and program.has_unread():
                self._over = "it replied before it received a request"
            if not self._over:
                program.send(request)
                return b"m" + program.receive()
        except Over as over:
            self._over = over.why
        return b"x" + self._over.encode()

    def _close_program(self) -> None:
        if self._program is not None:
            self._program.close()
        if self._program_cell is not None:
            self._program_cell.close()
            self._program_cell = None


def _await_end(tests: Exchange) -> None:
    """Wait until the process of tests exits after its last message, so that its cell can run the next program's tests.

    Raises _TestsStopped if it does not exit.
    """
    tests.run.room_s += END_ROOM_S
    try:
        while tests.run.status is None:
            tests.run.wait({})
    except Stopped as stopped:
        raise _TestsStopped({"unjudgeable": f"the tests did not run to their end: {stopped.why}"}) from stopped


def _read_findings(body: bytes) -> dict[str, Any]:
    """Check the report of a process of tests, which may come from code of the row. Raises Over, Unjudgeable."""
    try:
        findings = json.loads(body) if len(body) <= MAX_FINDINGS_BYTES else None
    except (ValueError, RecursionError):
        findings = None
    if not isinstance(findings, dict):
        raise Over("it reported no findings")
    if isinstance(findings.get("unjudgeable"), str):
        raise Unjudgeable(findings["unjudgeable"][:MAX_WORD_CHARS])
    numbers = [findings.get("num_tests"), findings.get("num_passed")]
    words = [findings.get("failures"), findings.get("weaker")]
    uses_helpers = findings.get("uses_helpers")
    are_counts = all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
    if not are_counts or not all(map(_are_words, words)) or not isinstance(uses_helpers, bool):
        raise Over("it reported no findings")
    return Findings(
        findings["num_tests"],
        findings["num_passed"],
        findings["failures"][:MAX_FAILURES],
        set(findings["weaker"]),
        uses_helpers,
    ).as_dict()


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) and len(word) <= MAX_WORD_CHARS for word in value)
