"""How a crashed or failed run ended, and the cause: the first finding of such a run.

Maps recorded reasons to causes, and causes to findings that may explain them. The findings are in waits.py,
learning.py, teaching.py and upkeep.py; the order of the rest in diagnosis.py.

The recorded reason determines the cause. A finding is added only if it explains that cause: if the reason is a wrong
path, a finding about the learning rate is not added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from controller.report.data import RunData, number
from controller.report.finding import Finding, Kind, Rated, plural, sentences

Cause = Literal[
    "policy", "scoring", "signal", "stale", "lengths", "prompts", "process", "version", "disk", "ledger", "mistake",
    "stall", "controller", "machine", "unknown",
]  # fmt: skip
"""Causes of the end of a run: stable names for programs."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
MISTAKE = " -> "
"""Separator in the text of every UserError, between the problem and the remedy."""
NAMES = re.compile(r"(?<![\w.~])[.~]{0,2}/\S+|\S+/\S+/\S*|`[^`]*`|\b[A-Z][A-Z0-9]*_[A-Z0-9_]*\b")
"""Paths, quoted names and environment variables: words of the user's, which say nothing about the cause."""
MAX_TITLE_CHARS = 200


@dataclass(frozen=True)
class Explained:
    """A cause, the reasons that indicate it, and the kinds of findings that may explain it."""

    cause: Cause
    reasons: str
    """Regular expression, case-insensitive."""
    kinds: tuple[Kind, ...] = ()


EXPLAINED: tuple[Explained, ...] = (
    Explained(
        "policy", r"not finite|diverged|not a finite number",
        ("policy_collapsed", "policy_worse", "policy_unstable", "updates_skipped"),
    ),
    Explained("signal", r"most were filtered", ("no_signal", "groups_filtered", "answers_cut")),
    Explained(
        "scoring", r"most were (too_few_scores|verdict)|no answer was scored", ("scoring_stalls", "scoring_fails")
    ),
    Explained("stale", r"most were stale", ("groups_dropped", "length_shift")),
    Explained("lengths", r"most were timeout", ("groups_dropped",)),
    Explained("prompts", r"prompts were rejected|most were (rejected|refused)", ("groups_dropped",)),
    Explained("process", r"most were lost_too_often", ("processes_lost",)),
    Explained("scoring", r"groups in a row", ("scoring_stalls", "scoring_fails")),
    Explained(
        "process", r"no rollout worker is left for batch \d+ \([\w-]+: lost(; [\w-]+: lost)*\)", ("processes_lost",)
    ),
    Explained("version", r"no rollout worker is left for batch", ("version_not_loaded", "processes_lost")),
    Explained(
        "disk",
        r"no space left|disk quota|file too large|read-only file system|input/output error|disk (is )?full"
        r"|cannot write|(cannot|could not) be written",
    ),
    Explained("ledger", r"ledger", ("audit_broken", "audit_impossible")),
    Explained("scoring", r"scorer|scoring|verdict", ("scoring_stalls", "scoring_fails")),
    Explained("mistake", re.escape(MISTAKE)),
    Explained("stall", r"for any progress|no progress", ("scoring_stalls", "version_not_loaded", "processes_lost")),
    Explained(
        "process", r"\bended with (signal|exit status|status)|is lost|silent for|restart|died", ("processes_lost",)
    ),
)  # fmt: skip
"""The first match is the cause."""


def verdict(data: RunData, found: Sequence[Rated]) -> tuple[Finding | None, Rated | None]:
    """The verdict on a run that crashed or failed, with its cause in the first sentence; and the finding it includes.

    found: all findings, the most important first.
    """
    kind = data.where.kind if data.where is not None else ""
    if kind == "crashed":
        return _crashed(data), None
    if kind != "failed":
        return None, None
    reason = str(data.state.get("reason") or "no reason is recorded")
    words = NAMES.sub("", reason)
    known = next((one for one in EXPLAINED if re.search(one.reasons, words, re.IGNORECASE)), None)
    end = _failed(data, reason, known.cause if known else "unknown")
    explains = known.kinds if known else ()
    cause = next((one for one in found if one.finding.kind in explains and one.finding.severity != "info"), None)
    return (_joined(end, reason, cause.finding) if cause else end), cause


def progress(data: RunData) -> str:
    """`3 of 12 steps`."""
    done = int(data.steps[-1]["step"]) if data.steps else int(number(data.summary, "steps", 0.0))
    steps = number(data.config, "num_steps")
    return f"{done:,} of {plural(int(steps), 'step')}" if math.isfinite(steps) else plural(done, "step")


def _crashed(data: RunData) -> Finding:
    words = (data.where.words if data.where else "").partition("crashed: ")[2]
    what, _, last = words.partition("; ")
    is_machine = "restarted" in what
    return Finding(
        "crashed",
        "bad",
        f"The run crashed after {progress(data)}{': ' if what else ''}{what}",
        sentences(last[:1].upper() + last[1:]),
        f"Continue with: areal-like resume {data.folder.root}; logs/controller.log shows what happened before the crash"
        + ("" if is_machine else ", and the kernel's log shows whether the machine ran out of memory"),
        cause="machine" if is_machine else "controller",
    )


def _failed(data: RunData, reason: str, cause: Cause) -> Finding:
    again = f"areal-like resume {data.folder.root}"
    what, mark, remedy = reason.partition(MISTAKE)
    if mark:
        advice = (
            f"Fix the cause given in the reason. To continue with the same configuration: {again}. With a different "
            "configuration, start a new run"
        )
    else:
        advice = f"After fixing the cause, continue with: {again}"
    what = " ".join(what.split())
    is_long = len(what) > MAX_TITLE_CHARS
    title = f"The run failed after {progress(data)}: {what[:MAX_TITLE_CHARS].rstrip()}{'...' if is_long else ''}"
    detail = sentences(" ".join(reason.split())) if is_long else ""
    return Finding("failed", "bad", title, detail, sentences(remedy, advice), cause=cause)


def _joined(end: Finding, reason: str, cause: Finding) -> Finding:
    """Join the end and its explanation to one verdict: the first sentence contains both."""
    return replace(
        end,
        title=f"{end.title.partition(': ')[0]}. {cause.title}",
        detail=sentences(reason, cause.detail),
        advice=sentences(cause.advice, end.advice),
        predicted=cause.predicted,
    )
