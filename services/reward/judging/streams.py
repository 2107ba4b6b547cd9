"""Tests that are input and expected output: the program runs once per test, and its output is compared outside.

The comparison is in output.py, sandboxes are in sandbox/.

Runs are isolated from each other: they share a sandbox only if each run in it has separate process ids, /tmp and
/dev/shm (Sandbox.has_fresh_runs); otherwise each run has its own sandbox. After a test that was stopped the sandbox is
always replaced.
"""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass

from services.reward.judging.output import is_expected
from services.reward.judging.problem import Compare, Findings, Streams
from services.reward.sandbox.cell import Cell
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.launch import file_of
from services.reward.sandbox.layers import Sandbox
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.run import Run, Stopped, words_for

CHUNK_BYTES = 1 << 16
ERROR_TAIL_BYTES = 400


@dataclass(frozen=True)
class Conditions:
    """How one program is judged by its output."""

    sandbox: Sandbox
    source: bytes
    limits: Limits
    deadline: Deadline
    partial_credit: bool
    compare: Compare
    float_tolerance: float


class Output:
    """Both output streams of one run, bounded together. Standard output is kept, and the end of standard error."""

    def __init__(self, max_bytes: int) -> None:
        self._room_bytes = max_bytes
        self._max_bytes = max_bytes
        self.printed, self.errors = bytearray(), b""
        self.read_fd, self.write_fd = os.pipe()
        self.errors_fd, self.errors_write_fd = os.pipe()
        self._open = {self.read_fd, self.errors_fd}
        for fd in self._open:
            os.set_blocking(fd, False)

    def interest(self) -> dict[int, int]:
        """Descriptors to wait for."""
        return dict.fromkeys(self._open, select.POLLIN)

    def take(self, fd: int) -> None:
        """Read once. Raises Stopped if there is too much output."""
        try:
            chunk = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._open.discard(fd)
        self._room_bytes -= len(chunk)
        if self._room_bytes < 0:
            raise Stopped(f"output limit of {self._max_bytes >> 10} kB")
        if fd == self.read_fd:
            self.printed += chunk
        else:
            self.errors = (self.errors + chunk)[-ERROR_TAIL_BYTES:]

    def take_rest(self) -> None:
        """Read the rest of the pipes, once no process can write any more. Raises Stopped."""
        while self._open:
            ready = dict(_poll(self._open))
            if not ready:
                return
            for fd in ready:
                self.take(fd)

    def close_theirs(self) -> None:
        """Close our copies of the ends that the program writes to."""
        os.close(self.write_fd)
        os.close(self.errors_write_fd)

    def close(self) -> None:
        """Close our ends."""
        os.close(self.read_fd)
        os.close(self.errors_fd)


def _poll(fds: set[int]) -> list[tuple[int, int]]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll.poll(0)


def judge_streams(problem: Streams, conditions: Conditions) -> Findings:
    """Run the tests. All of them with partial credit, else up to the first failure. Raises SandboxFailed."""
    findings = Findings(num_tests=len(problem.tests))
    cell: Cell | None = None
    try:
        for number, (given, expected) in enumerate(problem.tests, 1):
            if conditions.deadline.is_over:
                findings.add_failure(number, "time limit of all its tests together")
                break
            if cell is None:
                cell = conditions.sandbox.open(conditions.source, conditions.limits, is_repeated=len(problem.tests) > 1)
                cell.wait_ready()
                conditions.deadline.start()
            try:
                why = _run_test(cell, conditions, given, expected)
            except Stopped as stopped:
                why = stopped.why
                is_spent = True
            else:
                is_spent = not conditions.sandbox.has_fresh_runs
            if is_spent:
                cell.close()
                cell = None
            if not why:
                findings.num_passed += 1
                continue
            findings.add_failure(number, why)
            if not conditions.partial_credit:
                break
    finally:
        if cell is not None:
            cell.close()
    return findings


def printout(conditions: Conditions) -> dict[str, str]:
    """Run the program once, without input; returns its output, the end of its errors, and why it failed (empty if it
    did not). Raises SandboxFailed."""
    output, failure = Output(conditions.limits.max_output_bytes), ""
    cell = conditions.sandbox.open(conditions.source, conditions.limits)
    try:
        cell.wait_ready()
        conditions.deadline.start()
        try:
            status = _run(cell, conditions, "", output)
            failure = "" if status == 0 else words_for(status, conditions.limits)
        except Stopped as stopped:
            failure = stopped.why
    finally:
        cell.close()
    printed, errors = (part.decode("utf-8", "replace") for part in (bytes(output.printed), output.errors))
    return {"printed": printed, "errors": errors, "failure": failure}


def _run_test(cell: Cell, conditions: Conditions, given: str, expected: str) -> str:
    """Run one test; returns why it failed, empty if it passed. Raises Stopped; the cell then cannot be used again."""
    output = Output(conditions.limits.max_output_bytes)
    status = _run(cell, conditions, given, output)
    if status != 0:
        return f"{words_for(status, conditions.limits)}{_last_line(output.errors)}"
    if not is_expected(bytes(output.printed), expected, conditions.compare, conditions.float_tolerance):
        return "wrong output"
    return ""


def _run(cell: Cell, conditions: Conditions, given: str, output: Output) -> int:
    """Run once and return the wait status; `output` is filled and closed. Raises Stopped."""
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(output.close)
        run = Run(cell, conditions.limits, conditions.deadline)
        with contextlib.ExitStack() as theirs:
            theirs.callback(output.close_theirs)
            stdin_fd = file_of(given.encode("utf-8", "surrogatepass"))
            theirs.callback(os.close, stdin_fd)
            cell.begin("script", [stdin_fd, output.write_fd, output.errors_write_fd])
        while run.status is None:
            for fd in run.wait(output.interest()):
                output.take(fd)
        output.take_rest()
    return run.status


def _last_line(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1][:120]}" if lines else ""
