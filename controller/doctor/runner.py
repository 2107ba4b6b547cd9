"""Runs checks concurrently, each with its own deadline, so that no check can block or crash the doctor.

One thread per check, all started at the same time; the caller waits only for their results. A check past its deadline
is reported and abandoned: its thread is a daemon, and its programs are killed at the end.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from controller.doctor.finding import Check, Finding, Line
from controller.doctor.machine import Machine

Say = Callable[[Sequence[str]], None]
"""Called with the running checks, whenever they change."""


def run_checks(checks: Sequence[Check], machine: Machine, say: Say = lambda names: None) -> list[Line]:
    """Run the checks; return a line for each check with a finding, in the order of `checks`."""
    answers: queue.SimpleQueue[tuple[int, Finding | None, float]] = queue.SimpleQueue()
    started_s = time.monotonic()
    for index, check in enumerate(checks):
        threading.Thread(
            target=_work, args=(index, check, machine, answers), name=f"doctor {check.name}", daemon=True
        ).start()
    lines: dict[int, Line | None] = {}
    while len(lines) < len(checks):
        waiting = [index for index in range(len(checks)) if index not in lines]
        say([checks[index].name for index in waiting])
        passed_s = time.monotonic() - started_s
        try:
            left_s = min(checks[index].deadline_s for index in waiting) - passed_s
            index, finding, wall_s = answers.get(timeout=max(left_s, 0.0))
            if index not in lines:
                lines[index] = _line(checks[index], finding, wall_s)
        except queue.Empty:
            passed_s = time.monotonic() - started_s
            for late in (index for index in waiting if checks[index].deadline_s <= passed_s):
                lines[late] = _line(checks[late], _overdue(checks[late]), passed_s)
    return [line for _, line in sorted(lines.items()) if line is not None]


def _work(
    index: int, check: Check, machine: Machine, answers: queue.SimpleQueue[tuple[int, Finding | None, float]]
) -> None:
    started_s = time.monotonic()
    try:
        finding = check.look(machine)
    except BaseException as error:  # fault boundary of a check
        finding = _raised(check, error)
    answers.put((index, finding, time.monotonic() - started_s))


def _line(check: Check, finding: Finding | None, wall_s: float) -> Line | None:
    return None if finding is None else Line(check.topic, check.name, finding, wall_s)


def _overdue(check: Check) -> Finding:
    return Finding(
        "problem" if check.is_needed else "warning",
        f"the check returned no result within {check.deadline_s:g} s",
        "a driver or a network file system may be hanging, or the machine may be overloaded; try again when "
        "the machine "
        "is idle",
    )


def _raised(check: Check, error: BaseException) -> Finding:
    if isinstance(error, ModuleNotFoundError):
        words = f"cannot be determined: {error}"
        return Finding(
            "problem" if check.is_needed else "warning", words, "first fix the problem that the line `packages` reports"
        )
    text = " ".join(str(error).split())[:200]
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({Path(place.filename).name}:{place.lineno})" if place else ""
    return Finding(
        "problem" if check.is_needed else "warning",
        f"the check itself failed: {type(error).__name__}{f': {text}' if text else ''}{where}",
        "this is a bug in the doctor or in a package that it checks; report the bug with the output of "
        "areal-like doctor --json",
    )
