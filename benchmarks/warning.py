"""Finds the step of a run at which its report would first have warned about the policy, from step metrics alone.

A run is read as it was after each step. Warnings are defined in controller/report/learning.py.
"""

from __future__ import annotations

from dataclasses import replace

from controller.report.data import RunData
from controller.report.finding import Weight
from controller.report.learning import find


def warning_of(data: RunData) -> tuple[int | None, str]:
    """The step and the warning; None and an empty text without a warning.

    A later report may no longer have it: a sign that has passed is reported only if it lasted a fifth of the run.
    """
    reports = ((step["step"], said(data, step["step"])) for step in data.steps)
    return next(((step, words) for step, words in reports if words), (None, ""))


def said(data: RunData, step: int) -> str:
    """The report's warning about the policy after a step, without evaluations; empty if there is none."""
    then = replace(data, steps=[row for row in data.steps if row["step"] <= step], evals=[])
    found = [rated.finding for rated in find(then) if rated.weight == Weight.POLICY]
    return f"{found[0].title}. {found[0].detail}" if found else ""
