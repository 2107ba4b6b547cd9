"""Diagnosis of a run: what is wrong, what to change, and the predicted effect, most important first.

Orders the findings of waits.py, learning.py, hacking.py, teaching.py, slices.py and upkeep.py, and adds the verdict.
Measurements are in shares.py, predictions in advice.py.

The first finding is the verdict on the run in one sentence: for a crashed or failed run its end, with the cause if
known; otherwise the worst finding; otherwise that the run is healthy, that there is too little data, or that other
programs used the machine so much that its waits cannot be judged.
"""

from __future__ import annotations

import math

from controller.report import (
    drawn,
    ending,
    hacking,
    learning,
    length_shift,
    minimum,
    signs,
    slices,
    teaching,
    upkeep,
    waits,
)
from controller.report.data import RunData, number
from controller.report.ending import progress
from controller.report.finding import Finding as Finding
from controller.report.finding import Rated, Weight, figure, percent, sentences
from controller.report.shares import Shares, measure
from controller.run_folder.run_folder import is_from_files

GOING = ("running", "foreign")
"""States of a run on another machine, which may be in progress."""


def diagnose(data: RunData) -> list[Finding]:
    """All findings, the verdict first; never empty."""
    shares = measure(data)
    kind = data.where.kind if data.where is not None else ""
    if data.state.get("command") in ("eval", "sft") or is_from_files(data.state):
        found = [rated for rated in upkeep.find(data, shares) if rated.weight != Weight.LOSS]
        if data.state.get("command") == "eval":
            found += [rated for rated in waits.find(data, shares) if rated.weight == Weight.REWARD]
            found += slices.find(data)
        return _ordered(data, found, _other_command(data))
    found = []
    if not data.setting("emulation", None):  # on emulated devices nothing is learned, and rewards are meaningless
        found = learning.find(data)
        is_collapsed = any(rated.weight == Weight.POLICY for rated in found)
        found += hacking.find(data)
        found += teaching.find(data, is_collapsed=is_collapsed)
    found += slices.find(data) + length_shift.find(data) + drawn.find(data)
    found += upkeep.find(data, shares) + waits.find(data, shares)
    if kind == "stopped" and upkeep.remaining(data) > 0:
        found.append(Rated(Weight.REMARK, _stopped(data)))
    if not (minimum.has_steps(data) and minimum.has_pulses(data)):
        return _ordered(data, found, _too_little(data))
    not_judged = [one for one in found if one.finding.kind == "machine_busy" and one.weight == Weight.WAIT]
    found = [rated for rated in found if rated not in not_judged]
    return _ordered(data, found, not_judged[0].finding if not_judged else _healthy(data, shares))


def _ordered(data: RunData, found: list[Rated], otherwise: Finding) -> list[Finding]:
    """Sort the findings, with the end of a crashed or failed run first; `otherwise` is the verdict if nothing is
    wrong.
    """
    found = sorted(found, key=lambda rated: rated.order)
    end, cause = ending.verdict(data, found)
    if end is not None:
        return [end, *(one.finding for one in found if one is not cause and minimum.has_enough(data, one.finding.kind))]
    found = [one for one in found if minimum.has_enough(data, one.finding.kind)]
    if any(one.finding.severity in ("bad", "warning") and one.weight > Weight.REMARK for one in found):
        return [one.finding for one in found]
    return [otherwise, *(one.finding for one in found)]


# ------------------------------------------------------------ verdicts


def _stopped(data: RunData) -> Finding:
    return Finding(
        "stopped",
        "info",
        f"The run was stopped after {progress(data)}",
        sentences(str(data.state.get("reason") or "")),
        f"Continue with: areal-like resume {data.folder.root}",
    )


def _other_command(data: RunData) -> Finding:
    command = data.state.get("command")
    if is_from_files(data.state):
        return _offline(data)
    if command == "sft":
        return Finding("supervised", "info", "The run has only supervised steps, for which there is no diagnosis")
    newest = data.evals[-1] if data.evals else None
    if newest is None:
        return Finding("evaluation", "info", "The evaluation has not finished yet")
    rows = figure(number(newest, "num_scored"))
    words = f"An evaluation: accuracy {number(newest, 'accuracy'):.3f} on {rows} prompts"
    return Finding("evaluation", "good", words)


def _offline(data: RunData) -> Finding:
    """A run from files: its progress, and the results on held-out rows."""
    done = f"Training from files: {progress(data)}"
    if not data.evals:
        remedy = (
            ""
            if data.setting("data.eval")
            else "Set data.eval to a file of held-out rows to measure what the model learns"
        )
        return Finding("offline", "info", done, advice=remedy)
    first, last = data.evals[0], data.evals[-1]
    changes = [
        f"{name} {number(first, name):.3f} to {number(last, name):.3f}"
        for name in ("accuracy", "loss", "margin")
        if name in last
    ]
    is_worse = number(last, "loss") > number(first, "loss")
    if is_worse and last is not first:
        advice = "Use fewer epochs, a lower trainer.optimizer.lr, or more rows"
        title = f"{done}; the loss on held-out rows has risen"
        return Finding("held_out_loss_rises", "warning", title, ", ".join(changes), advice)
    return Finding("offline", "good", done, f"On held-out rows: {', '.join(changes)}")


def _too_little(data: RunData) -> Finding:
    """No verdict: fewer than the minimum of steps or pulses."""
    going = data.where is not None and data.where.kind in GOING
    needed = f"{minimum.MIN_STEPS} steps"
    if minimum.has_steps(data):
        what = f"measurements ({len(data.pulses)} of {minimum.MIN_PULSES}) to determine which process waits for which"
        needed = f"{minimum.MIN_PULSES} measurements (2 s or more apart)"
    else:
        what = "steps for a diagnosis"
    begin = "No problem has been found so far, but it is too early for a diagnosis" if going else f"Too few {what}"
    return Finding(
        "too_short",
        "info",
        f"{begin}: {progress(data)}",
        sentences(*(_waiting_now(data) if going else [])),
        f"A diagnosis requires at least {needed}",
    )


def _healthy(data: RunData, shares: Shares) -> Finding:
    kind = data.where.kind if data.where is not None else ""
    facts = [progress(data) + (", then stopped" if kind == "stopped" else "")]
    accuracies = [number(row, "accuracy") for row in data.evals]
    if len(accuracies) >= 2:
        facts.append(f"accuracy {accuracies[0]:.3f} to {accuracies[-1]:.3f}")
    reward = signs.trend(data, "reward_mean")
    if len(data.steps) >= learning.MIN_TREND_STEPS and math.isfinite(reward.early):
        facts.append(f"reward {figure(reward.early)} to {figure(reward.late)}")
    if math.isfinite(shares.trainer_wait):
        facts.append(f"trainer waited {percent(shares.trainer_wait)}")
    if math.isfinite(shares.rollout_idle):
        left_out = ["the start and the end of the run"] if shares.is_steady else []
        left_out += ["the time of other programs"] if shares.load.is_partial else []
        part = f" (without {' and '.join(left_out)})" if left_out else ""
        facts.append(f"rollout workers were idle {percent(shares.rollout_idle)}{part}")
    if shares.cores_used and math.isfinite(shares.cores):
        facts.append(f"{sum(shares.cores_used.values()):.1f} of {shares.cores:g} cores in use")
    stale = signs.trend(data, "staleness_mean")
    bound = data.setting("staleness.max_staleness")
    if math.isfinite(stale.late) and bound is not None:
        facts.append(f"staleness {figure(stale.late)} of at most {bound}")
    if (data.summary or {}).get("audit") == "clean":
        facts.append("audit clean")
    begin = "Healthy so far" if kind in GOING else "Healthy"
    hint = ""
    if shares.rollout_idle >= 0.2:
        hint = "Rollout workers have spare capacity; the trainer is the bottleneck and is always busy"
    elif shares.trainer_wait >= 0.05:
        hint = "The trainer waits for a small part of its time; one more rollout worker would avoid this"
    return Finding("healthy", "good", f"{begin}: {', '.join(facts)}", hint)


def _waiting_now(data: RunData) -> list[str]:
    status_waits = (data.status or {}).get("waits")
    newest = status_waits if isinstance(status_waits, list) else data.pulses[-1]["waits"] if data.pulses else []
    return [str(line) for line in newest[:3]]
