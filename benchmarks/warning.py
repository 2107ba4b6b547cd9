"""At which step of a run its report would first have warned of the policy, from the numbers of the steps alone.

Owns: reading a run again as it stood after a step. Refuses: what a warning is (controller/report/learning.py).
"""

from __future__ import annotations

from dataclasses import replace

from controller.report.data import RunData
from controller.report.finding import Weight
from controller.report.learning import find


def warning_of(data: RunData) -> tuple[int | None, str]:
    """The step, and what was said; None and nothing for a run of which nothing was said.

    A reader who looks later may not see it any more: a sign that went is reported only if it lasted a fifth of the run.
    """
    reports = ((step["step"], said(data, step["step"])) for step in data.steps)
    return next(((step, words) for step, words in reports if words), (None, ""))


def said(data: RunData, step: int) -> str:
    """What the report would have said of the policy after a step, without evaluations; empty if nothing."""
    then = replace(data, steps=[row for row in data.steps if row["step"] <= step], evals=[])
    found = [rated.finding for rated in find(then) if rated.weight == Weight.POLICY]
    return f"{found[0].title}. {found[0].detail}" if found else ""
