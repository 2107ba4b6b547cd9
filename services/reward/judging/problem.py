"""Data types between scorer, judge and sandbox: the tests of a program, and the findings.

They are exchanged as JSON. Rows of data sets are in scorers/program_rows.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MAX_FAILURES = 3

Compare = Literal["tokens", "lines", "exact"]


class Unjudgeable(Exception):
    """The tests themselves cannot be used; the program is not at fault."""


@dataclass(frozen=True)
class Asserts:
    """Tests that are Python.

    tests: pieces of code, each a test; setup: code before them. is_check_function: each piece may define `check`, which
    is then called with the tested function. entry_point: its name, or empty. prompt: HumanEval's beginning of the
    program, whose helpers tests may use. reference: the task's own solution, read for its names only.
    """

    tests: tuple[str, ...]
    setup: str = ""
    is_check_function: bool = False
    entry_point: str = ""
    prompt: str = ""
    reference: str = ""


@dataclass(frozen=True)
class Streams:
    """Tests that are (input, expected output) of a whole program."""

    tests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Printout:
    """No test: the program runs once, and its output is the result."""


@dataclass(frozen=True)
class Task:
    """One program to be judged. limits: as `Limits.as_dict`; total_limit_s: own time for all tests together."""

    program: str
    problem: Asserts | Streams | Printout
    limits: dict[str, Any]
    total_limit_s: float
    partial_credit: bool = False
    float_tolerance: float = 0.0
    compare: Compare = "tokens"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `of` is the inverse."""
        kinds = {Asserts: "asserts", Streams: "streams", Printout: "printout"}
        return {**asdict(self), "kind": kinds[type(self.problem)]}

    @staticmethod
    def of(fields: dict[str, Any]) -> Task:
        """Raises TypeError and KeyError for anything `as_dict` did not write."""
        fields = dict(fields)
        kind, problem = fields.pop("kind"), dict(fields.pop("problem"))
        if kind == "asserts":
            return Task(**fields, problem=Asserts(**{**problem, "tests": tuple(problem["tests"])}))
        if kind == "printout":
            return Task(**fields, problem=Printout())
        return Task(**fields, problem=Streams(tuple((given, expected) for given, expected in problem["tests"])))


@dataclass
class Findings:
    """What the judge found. Without partial credit the tests after the first failure were not run."""

    num_tests: int = 0
    num_passed: int = 0
    failures: list[str] = field(default_factory=list)
    weaker: set[str] = field(default_factory=set)
    """Types of the program whose objects decided the result of a test."""
    uses_helpers: bool = False
    """The tests called helpers of the task's prompt."""

    def add_failure(self, number: int, why: str) -> None:
        """`number`: from 1; 0 for the program as a whole."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(f"test {number}: {why}" if number else why)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "weaker": sorted(self.weaker)}
