"""Tests that are Python: assert statements, or a `check` function. They run here, in the process of tests.

It defines the tests' namespace, runs each test, and decides whether the program or the test is at fault. The program is
in program.py, names in names.py, row formats in problem.py. This code is not trusted, because it shares its process
with code of the row (tests_process.py).

All tests of a program run against one process of it, one after the other, as if they followed it in one file. With
partial credit, a program that died gets a new process for the remaining tests. If tests use helpers of the task's
prompt (HumanEval's `poly`), the program must pass with the prompt's version and with its own, because its own may be
wrong or manipulated.
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.reward.judging.names import Meanings, bind, make_hints, meanings_of
from services.reward.judging.problem import Asserts, Findings, Unjudgeable
from services.reward.judging.program import TESTS, LateProgram, Program, ProgramOver, ProgramSource, Raised
from services.reward.judging.remote import World
from services.reward.judging.rewriting import num_asserts_in_check, with_counted_asserts, with_tolerance

MAX_REASON_CHARS = 160
TIME_IS_OVER = "time limit of all its tests together"
MAX_RECURSION = 3_000
"""Recursion limit, because results may be nested more deeply than a test's own code."""


class TestFailed(Exception):
    """One test failed; the message says why."""


@dataclass(frozen=True)
class Conditions:
    """How one program is judged by its asserts."""

    source: ProgramSource
    partial_credit: bool
    float_tolerance: float
    prefers_own: bool = False
    """Use the program's versions of the prompt's helpers, if it has any."""


class Session:
    """One process of the program with the tests' namespace around it."""

    def __init__(self, problem: Asserts, conditions: Conditions, findings: Findings) -> None:
        """Raises Unjudgeable."""
        self._problem, self._conditions, self._findings = problem, conditions, findings
        self._hints = make_hints(problem.entry_point, problem.reference, problem.prompt, conditions.prefers_own)
        self._meanings = Meanings()
        self._namespace: dict[str, Any] = {"__name__": TESTS}
        self._imports = _modules_of(problem)
        self._program = Program(conditions.source)
        self.world = World(self._program)

    def begin(self) -> None:
        """Load the program and run the tests' set-up. Raises TestFailed, Unjudgeable, LateProgram."""
        with self._blame("the program"):
            self._program.load()
        with self._blame("the set-up of its tests"):
            self._meanings = meanings_of((self._problem.setup, *self._problem.tests), self.world, self._hints)
            self._execute(ast.parse(self._problem.setup), self._problem.setup)

    def run(self, test: str) -> None:
        """Run one test. Raises TestFailed, Unjudgeable."""
        with self._blame(""):
            tree = ast.parse(test)
            if self._counts_asserts:
                tree = with_counted_asserts(tree, self._namespace, self._findings)
            self._execute(tree, test)
            if self._problem.is_check_function:
                self._call_check()

    @property
    def _counts_asserts(self) -> bool:
        return self._problem.is_check_function and self._conditions.partial_credit

    def is_over(self) -> bool:
        """Whether the program's process can no longer be used."""
        return bool(self._program.over)

    def uses_helpers(self) -> bool:
        """Whether the tests use functions of the task's prompt, taken from the prompt."""
        return any(
            callable(value) and self._namespace.get(name) is value for name, value in self._hints.trusted.items()
        )

    def _execute(self, tree: ast.Module, source: str) -> None:
        bind(source, self._namespace, self.world, self._hints, self._meanings)
        if self._conditions.float_tolerance:
            tree = with_tolerance(tree, self._namespace, self._conditions.float_tolerance)
        exec(compile(tree, "<test>", "exec"), self._namespace)

    def _call_check(self) -> None:
        check = self._namespace.get("check")
        if check is None:
            return
        entry_point = self._hints.entry_point
        bind(entry_point, self._namespace, self.world, self._hints, self._meanings)
        if entry_point not in self._namespace:
            raise TestFailed(f"the program does not define {entry_point}")
        check(self._namespace[entry_point])

    @contextlib.contextmanager
    def _blame(self, where: str) -> Iterator[None]:
        """Convert exceptions in the block to TestFailed (the program's fault) or Unjudgeable (the test's)."""
        prefix = f"{where}: " if where else ""
        try:
            with _silence():
                yield
        except (TestFailed, Unjudgeable, LateProgram):
            raise
        except ProgramOver as over:
            raise TestFailed(f"{prefix}{over}") from None
        except BaseException as error:
            if self._program.unanswerable:
                raise Unjudgeable(self._program.unanswerable) from error
            is_own = isinstance(error, ImportError) and not isinstance(error, Raised)
            if is_own and (getattr(error, "name", None) or "").partition(".")[0] in self._imports:
                raise Unjudgeable(f"a test cannot be run ({type(error).__name__}: {error})") from error
            raise TestFailed(prefix + _describe(error)) from None
        if self._program.over:  # a test may have swallowed it
            raise TestFailed(f"{prefix}{self._program.over}")
        if self._program.unanswerable:
            raise Unjudgeable(self._program.unanswerable)


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())
    except BaseException:  # its text comes from an object of the program
        text = ""
    who = "the program raises " if isinstance(error, Raised) else ""
    return f"{who}{name}: {text}"[:MAX_REASON_CHARS] if text else f"{who}{name}"


def _modules_of(problem: Asserts) -> set[str]:
    """Top-level names of the modules that the tests import. Raises Unjudgeable if a test is not valid Python."""
    found: set[str] = set()
    for source in (problem.setup, *problem.tests):
        try:
            nodes = list(ast.walk(ast.parse(source)))
        except (SyntaxError, ValueError, RecursionError) as error:
            raise Unjudgeable(f"a test cannot be run ({type(error).__name__}: {error})") from error
        found |= {
            alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        found |= {(node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    return found - {""}


class _Nothing(io.TextIOBase):
    """A text stream that discards its input. A sandbox may have no writable file, not even /dev/null."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard the output of tests."""
    nothing = _Nothing()
    with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def judge_asserts(problem: Asserts, conditions: Conditions) -> Findings:
    """Run the tests: all of them with partial credit, else up to the first failure.

    Raises Unjudgeable.
    """
    sys.setrecursionlimit(MAX_RECURSION)
    random.seed(0)  # tests with random inputs give the same verdict twice
    judge_once = _judge_check if problem.is_check_function and conditions.partial_credit else _judge_tests
    findings = judge_once(problem, conditions)
    if findings.uses_helpers and not findings.failures:
        findings = judge_once(problem, replace(conditions, prefers_own=True))
    return findings


def _judge_tests(problem: Asserts, conditions: Conditions) -> Findings:
    """Run the tests. Each piece of code with an assert counts; the others are set-up."""
    has_assert = [_asserts_something(test) for test in problem.tests]
    counts = has_assert if any(has_assert) else [True] * len(problem.tests)
    findings = Findings(num_tests=sum(counts))
    waiting, prepared = list(zip(range(1, len(counts) + 1), counts, problem.tests, strict=True)), list[str]()
    while waiting:
        session = Session(problem, conditions, findings)
        try:
            session.begin()
            for preparation in prepared:
                session.run(preparation)
            while waiting and not session.is_over():
                number, is_counted, test = waiting.pop(0)
                try:
                    session.run(test)
                    findings.num_passed += is_counted
                    prepared += [] if is_counted else [test]
                except TestFailed as failed:
                    findings.add_failure(number, str(failed))
                    if not conditions.partial_credit:
                        return findings
        except TestFailed as failed:  # it fails to start, and would fail again
            findings.add_failure(0, str(failed))
            return findings
        except LateProgram:
            findings.add_failure(0, TIME_IS_OVER)
            return findings
        finally:
            findings.weaker |= session.world.weaker
            findings.uses_helpers |= session.uses_helpers()
    return findings


def _asserts_something(test: str) -> bool:
    try:
        return any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(test)))
    except (SyntaxError, ValueError, RecursionError):  # the session reports it
        return True


def _judge_check(problem: Asserts, conditions: Conditions) -> Findings:
    """Run one `check` function and count its asserts; those that were not reached count as failed."""
    findings = Findings()
    session = Session(problem, conditions, findings)
    try:
        session.begin()
        for test in problem.tests:
            session.run(test)
    except TestFailed as failed:
        findings.add_failure(0, str(failed))
        findings.num_tests += 1
    except LateProgram:
        findings.add_failure(0, TIME_IS_OVER)
        findings.num_tests += 1
    finally:
        findings.weaker |= session.world.weaker
        findings.uses_helpers |= session.uses_helpers()
    with contextlib.suppress(SyntaxError):
        written = sum(num_asserts_in_check(ast.parse(test)) for test in problem.tests)
        findings.num_tests = max(findings.num_tests, written)
    return findings
