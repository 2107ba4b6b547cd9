"""A program whose functions are called by tests, in a thread of this process instead of a sandbox: quick, and unsafe.

For programs that these tests wrote themselves; what a program answers is made by the code that answers in a sandbox.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.reward.judging.assertions import Conditions, judge_asserts
from services.reward.judging.problem import Asserts, Findings
from services.reward.judging.program import LateProgram, ProgramOver
from services.reward.sandbox import inside_answering, inside_writing

LIMIT_S = 300.0
SHARED = {inside_writing: ("Writer", "tag", "CannotPass", "MAX_NAME_CHARS")}
"""What the parts of the inside find in one namespace where they run."""


class _Gone(BaseException):
    """The judge let the program go."""


class _Respondent(inside_answering.Responder):
    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(-1, names)
        self.questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def send(self, text: str) -> None:
        self.answers.put(text.encode())

    def receive(self) -> Any:
        question = self.questions.get()
        if question is None:
            raise _Gone
        self.request = question
        return eval(question, self.environment)


class ProgramHere:
    """Where processes of one program come from, as the tests see it. A program that calls `die()` is gone at once."""

    def __init__(self, source: str, num_starts: int = 100) -> None:
        self._source, self._starts_left = source, num_starts
        self.num_starts = 0
        self.questions: list[str] = []
        self._present: _Respondent | None = None
        for module, names in SHARED.items():
            for name in names:
                setattr(inside_answering, name, getattr(module, name))

    def open_program(self) -> bytes:
        self.close()
        if self.num_starts == self._starts_left:
            raise LateProgram
        self.num_starts += 1

        def die() -> None:
            respondent.answers.put(None)
            raise _Gone

        respondent = _Respondent({"__name__": "__main__", "die": die})
        self._present = respondent

        def run() -> None:
            try:
                respondent.serve(self._source.encode())
            except _Gone:
                pass

        threading.Thread(target=run, daemon=True).start()
        return self._answer(respondent)

    def ask_program(self, request: bytes) -> bytes:
        respondent = self._present
        assert respondent is not None
        self.questions.append(request.decode())
        respondent.questions.put(request)
        return self._answer(respondent)

    def _answer(self, respondent: _Respondent) -> bytes:
        answer = respondent.answers.get(timeout=LIMIT_S)
        if answer is None:
            raise ProgramOver("it ended early (exit status 0)")
        return answer

    def close(self) -> None:
        if self._present is not None:
            self._present.questions.put(None)
            self._present = None


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Judging sets up its process for itself; here that process goes on."""
    depth, state = sys.getrecursionlimit(), random.getstate()
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        random.setstate(state)


def judged(
    program: str | ProgramHere,
    *tests: str,
    partial_credit: bool = False,
    float_tolerance: float = 0.0,
    **problem: Any,
) -> Findings:
    """What is found about a program by these tests. Raises Unjudgeable."""
    source = ProgramHere(program) if isinstance(program, str) else program
    try:
        with _as_it_was():
            return judge_asserts(Asserts(tests, **problem), Conditions(source, partial_credit, float_tolerance))
    finally:
        source.close()
