"""Scorer `code`: runs the tests of a row on the program in a response.

Programs run in judging and sandbox: this process never executes, compiles or parses them.

A program that fails, hangs, prints too much, forks or crashes is a wrong answer: 0. A verdict without a value is given
only if the program is not at fault: for a row without usable tests (`invalid`), or a sandbox that fails (`crashed`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from areal_like.errors import OperationError, UserError
from services.reward.code_options import CodeOptions
from services.reward.judging.client import Judges, NoSandbox
from services.reward.judging.problem import Task
from services.reward.sandbox.demands import SANDBOX_REMEDY
from services.reward.sandbox.limits import Limits
from services.reward.scorers.port import CannotJudge, ScorerInput
from services.reward.scorers.program_rows import memory_limit_of, problem_of, prompt_of, time_limit_of
from services.reward.scorers.program_text import program_in

MAX_REMARK_CHARS = 400


class SandboxBroke(OperationError):
    """The sandbox or its judge failed, not the program; the request is retried."""


class CodeScorer:
    """Returns 1.0 for a program that passes all tests, else 0.0, or with partial credit the share of passed tests.

    `correct`: all passed; `passed`: their share (of those that ran, without partial credit up to the first failure).
    """

    def __init__(self, options: CodeOptions) -> None:
        """Raises UserError if no sandbox is as strong as required."""
        self._options = options
        self._judges = Judges(options.require, options.python or "", () if options.layer is None else (options.layer,))
        try:
            self._judges.start()
        except NoSandbox as error:
            raise UserError(
                f"no sandbox layer as strong as `{options.require}` works on this machine: {error}",
                where="reward scorer code",
                remedy=SANDBOX_REMEDY,
            ) from None
        self.version = f"2/{self._judges.layer}"
        print(
            f"programs run in the sandbox layer {self._judges.layer}: {self._judges.words}", file=sys.stderr, flush=True
        )

    def warm_up(self) -> None:
        """Do nothing: the sandbox was tried when it was chosen."""

    def score(self, sample: ScorerInput) -> Mapping[str, Any]:
        options = self._options
        problem = problem_of(sample.row)
        time_s = time_limit_of(sample.row, options.time_limit_s, options.time_factor)
        memory_bytes = memory_limit_of(sample.row, options.memory_limit_mb << 20)
        program = self._program(sample)
        if not program:
            return _failed("the answer contains no program")
        if len(program) > options.max_program_chars:
            return _failed(f"the program is longer than {options.max_program_chars} characters")
        if options.must_stop and sample.finish_reason != "stop":
            return _failed("the answer was truncated at the token limit")
        limits = Limits(
            time_s=min(time_s, options.total_limit_s),
            memory_bytes=min(memory_bytes, options.max_memory_limit_mb << 20),
            max_tasks=options.max_processes,
            max_file_bytes=options.max_file_mb << 20,
            max_open_files=options.max_open_files,
            tmp_bytes=options.tmp_mb << 20,
            max_output_bytes=options.max_output_kb << 10,
        )
        task = Task(
            program=program,
            problem=problem,
            limits=limits.as_dict(),
            total_limit_s=options.total_limit_s,
            partial_credit=options.partial_credit,
            float_tolerance=options.float_tolerance,
            compare=options.compare,
        )
        return self._values(self._judges.judge(task))

    def _program(self, sample: ScorerInput) -> str:
        given = sample.row.get("program")
        if isinstance(given, str) and sample.response in ("", given):  # the unchanged program is judged
            return given
        if self._options.extract == "whole":
            return sample.response if sample.response.strip() else ""
        entry_point = sample.row.get("entry_point")
        return program_in(sample.response, prompt_of(sample.row), entry_point if isinstance(entry_point, str) else "")

    def _values(self, outcome: Mapping[str, Any]) -> Mapping[str, Any]:
        if "unjudgeable" in outcome:
            raise CannotJudge(str(outcome["unjudgeable"]))
        if "failed" in outcome:
            raise SandboxBroke(str(outcome["failed"]))
        num_tests, num_passed = int(outcome["num_tests"]), int(outcome["num_passed"])
        weaker = list(outcome["weaker"])
        if weaker and self._options.own_classes == "invalid":
            raise CannotJudge(f"the tests compare objects of the program's own classes ({', '.join(weaker)[:100]})")
        is_correct = num_passed == num_tests and not outcome["failures"]
        share = min(num_passed / num_tests, 1.0) if num_tests else 0.0
        words = [*map(str, outcome["failures"])]
        if weaker:
            words.append(
                f"weaker mode: the verdict depends on objects of the program's own types ({', '.join(weaker)[:100]})"
            )
        return {
            "value": share if self._options.partial_credit else float(is_correct),
            "correct": float(is_correct),
            "passed": share,
            **({"weaker": 1.0} if weaker else {}),
            "remark": _printable("; ".join(words)[:MAX_REMARK_CHARS]),
        }


def _printable(text: str) -> str:
    """Text of a program, made safe for logs, terminals and messages."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _failed(why: str) -> Mapping[str, Any]:
    return {"value": 0.0, "correct": 0.0, "passed": 0.0, "remark": why}
