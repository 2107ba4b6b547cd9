"""What is wrong with a run, what to change, and what that would bring; the most important first.

Owns: the order, the verdict in the first finding. Refuses: reading (table.py), measuring (shares.py), the single looks
(waits.py, learning.py, teaching.py, upkeep.py), the model behind predictions (advice.py).

The first finding is the verdict on the run in one sentence. Where the run crashed or failed it says so, with the cause
where one is known; else it is the worst that was found; else the run is healthy, or there is too little to judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from controller.report import learning, length_shift, signs, teaching, upkeep, waits
from controller.report.data import RunData, number
from controller.report.finding import Finding as Finding
from controller.report.finding import Rated, Weight, figure, percent, plural, sentences
from controller.report.shares import Shares, measure

CAUSES: Mapping[Weight, tuple[str, ...]] = {
    Weight.POLICY: ("not finite", "diverged", "in a row"),
    Weight.REWARD: ("in a row", "scor", "reward", "verdict", "no progress", "stall"),
    Weight.SIGNAL: ("in a row", "filtered", "signal"),
    Weight.LOSS: ("in a row", "dropped", "stale", "no progress"),
}
"""What can make a run fail by itself, and words of the reasons that it explains: a run that died of a wrong path did
not die of its learning rate."""
MISTAKE = " -> "
"""In the words of every mistake of the user's (UserError): between what is wrong and what to do."""
GOING = ("running", "foreign")
"""On another machine it may be going on."""


def diagnose(data: RunData) -> list[Finding]:
    """All findings, the verdict first; never empty."""
    shares = measure(data)
    kind = data.where.kind if data.where is not None else ""
    if data.state.get("command") in ("eval", "sft"):
        found = [rated for rated in upkeep.find(data, shares) if rated.weight != Weight.LOSS]
        if data.state.get("command") == "eval":
            found += [rated for rated in waits.find(data, shares) if rated.weight == Weight.REWARD]
        return _ordered(data, found, _other_command(data))
    policy = learning.find(data)
    is_collapsed = any(rated.weight == Weight.POLICY for rated in policy)
    found = policy + teaching.find(data, is_collapsed=is_collapsed)
    found += length_shift.find(data) + upkeep.find(data, shares) + waits.find(data, shares)
    if kind == "stopped" and upkeep.remaining(data) > 0:
        found.append(Rated(Weight.REMARK, _stopped(data)))
    if len(data.steps) < waits.MIN_STEPS:
        return _ordered(data, found, _too_little(data))
    return _ordered(data, found, _healthy(data, shares))


def _ordered(data: RunData, found: list[Rated], otherwise: Finding) -> list[Finding]:
    """Sorted, with the end of a run that went wrong on top, and `otherwise` as verdict where nothing is wrong."""
    found = sorted(found, key=lambda rated: rated.order)
    if (end := _bad_end(data)) is not None:
        cause = next((one for one in found if _explains(one, data)), None)
        rest = [one.finding for one in found if one is not cause]
        return [_explained(end, cause.finding) if cause else end, *rest]
    if any(one.finding.severity in ("bad", "warning") and one.weight > Weight.REMARK for one in found):
        return [one.finding for one in found]
    return [otherwise, *(one.finding for one in found)]


def _explains(rated: Rated, data: RunData) -> bool:
    """The finding is a cause of the recorded reason for which the run failed."""
    if data.where is None or data.where.kind != "failed" or rated.finding.severity == "info":
        return False
    reason = str(data.state.get("reason") or "").lower()
    return any(words in reason for words in CAUSES.get(rated.weight, ()))


def _explained(end: Finding, cause: Finding) -> Finding:
    """The end and its cause as one verdict: who reads only the first line knows both."""
    return Finding(
        "bad",
        f"{end.title.rstrip('.')}. {cause.title}",
        sentences(end.detail, cause.detail),
        sentences(cause.advice, end.advice),
        cause.predicted,
    )


# ------------------------------------------------------------ verdicts


def _bad_end(data: RunData) -> Finding | None:
    kind = data.where.kind if data.where is not None else ""
    done = _progress(data)
    if kind == "crashed":
        return Finding(
            "bad",
            f"The run crashed after {done}",
            sentences(data.where.words.removeprefix("crashed: ") if data.where else ""),
            f"Continue with: areal-like resume {data.folder.root}; logs/controller.log shows what happened before",
        )
    if kind == "failed":
        reason = str(data.state.get("reason") or "no reason is recorded")
        again = f"areal-like resume {data.folder.root}"
        if MISTAKE in reason:
            advice = f"Fix the cause named in the reason. With the same configuration: {again}; with another, a new run"
        else:
            advice = f"When the cause is fixed: {again}"
        return Finding("bad", f"The run failed after {done}", sentences(reason), advice)
    return None


def _stopped(data: RunData) -> Finding:
    return Finding(
        "info",
        f"The run was stopped after {_progress(data)}",
        sentences(str(data.state.get("reason") or "")),
        f"Continue with: areal-like resume {data.folder.root}",
    )


def _other_command(data: RunData) -> Finding:
    command = data.state.get("command")
    if command == "sft":
        return Finding("info", "Supervised steps only: there is nothing to diagnose")
    newest = data.evals[-1] if data.evals else None
    if newest is None:
        return Finding("info", "An evaluation that has no result yet")
    rows = figure(number(newest, "num_scored"))
    return Finding("good", f"An evaluation: accuracy {number(newest, 'accuracy'):.3f} on {rows} prompts")


def _too_little(data: RunData) -> Finding:
    going = data.where is not None and data.where.kind in GOING
    begin = "No problem found so far, but too early to judge" if going else "Too few steps to judge"
    return Finding(
        "info",
        f"{begin}: {_progress(data)}",
        sentences(*(_waiting_now(data) if going else [])),
        f"A run of {waits.MIN_STEPS} steps or more can be judged",
    )


def _healthy(data: RunData, shares: Shares) -> Finding:
    kind = data.where.kind if data.where is not None else ""
    facts = [_progress(data) + (", then stopped" if kind == "stopped" else "")]
    accuracies = [number(row, "accuracy") for row in data.evals]
    if len(accuracies) >= 2:
        facts.append(f"accuracy {accuracies[0]:.3f} to {accuracies[-1]:.3f}")
    reward = signs.trend(data, "reward_mean")
    if len(data.steps) >= learning.MIN_TREND_STEPS and math.isfinite(reward.early):
        facts.append(f"reward {figure(reward.early)} to {figure(reward.late)}")
    if math.isfinite(shares.trainer_wait):
        facts.append(f"trainer waited {percent(shares.trainer_wait)}")
    if math.isfinite(shares.rollout_idle):
        part = " (start and end left out)" if shares.is_steady else ""
        facts.append(f"rollout workers were idle {percent(shares.rollout_idle)}{part}")
    if shares.cores_used and math.isfinite(shares.cores):
        facts.append(f"{sum(shares.cores_used.values()):.1f} of {shares.cores:g} cores at work")
    stale = signs.trend(data, "staleness_mean")
    bound = data.setting("staleness.max_staleness")
    if math.isfinite(stale.late) and bound is not None:
        facts.append(f"staleness {figure(stale.late)} of at most {bound}")
    if (data.summary or {}).get("audit") == "clean":
        facts.append("audit clean")
    begin = "Healthy so far" if kind in GOING else "Healthy"
    hint = ""
    if shares.rollout_idle >= 0.2:
        hint = "Rollout workers have spare time: the trainer is the bottleneck and is kept busy"
    elif shares.trainer_wait >= 0.05:
        hint = "The trainer waits a little; one more rollout worker would remove the wait"
    return Finding("good", f"{begin}: {', '.join(facts)}", hint)


def _progress(data: RunData) -> str:
    done = int(data.steps[-1]["step"]) if data.steps else int(number(data.summary, "steps", 0.0))
    steps = number(data.config, "num_steps")
    return f"{done:,} of {plural(int(steps), 'step')}" if math.isfinite(steps) else plural(done, "step")


def _waiting_now(data: RunData) -> list[str]:
    status_waits = (data.status or {}).get("waits")
    newest = status_waits if isinstance(status_waits, list) else data.pulses[-1]["waits"] if data.pulses else []
    return [str(line) for line in newest[:3]]
