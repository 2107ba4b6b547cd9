"""Findings other than learning and waiting: end of the run, audit, dropped work, processes, memory, sinks.

Waits are in waits.py, the policy in learning.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from areal_like.config import DEFAULT_TRANSFER
from areal_like.weights.registry import TRANSFERS
from controller.report.advice import faster_transfers, has_reward_service, scoring_logs
from controller.report.data import RunData, number, series
from controller.report.finding import Finding, Rated, Severity, Weight, capital, figure, percent, plural, sentences
from controller.report.shares import Shares

DROPPED_NOTABLE = 0.05
"""One discarded group in twenty costs as much as all waits of a well-configured run."""
DROPPED_BAD = 0.5
STALE_NEAR = 0.8
"""Mean staleness, as a share of the bound, above which the bound is the reason for dropped groups."""
PACKING_LOW = 0.7
"""Below this, more than three tenths of each micro-batch's budget are unused (Algorithm 1 of the paper fills over
0.9).
"""
MIN_MICRO_BATCHES = 2.0
"""A batch that fits into one micro-batch need not be full, at no cost."""
MIN_MEMORY_PULSES = 20
MEMORY_GROWTH = 0.25
"""Relative growth over the second half of a run: caches fill in the first half, leaks continue."""
MEMORY_MB = 100.0
"""Smaller growth is attributed to the allocator."""
RESTARTS_BAD = 3
STAGE_NOTABLE = 0.5
"""Time of copying a version next to the engine, as a share of a step; beyond it workers fall behind the trainer."""
DROP_ADVICE = {
    "stale": "increase staleness.max_staleness, or set staleness.on_stale: wait, which drops no groups",
    "surplus": "the staleness bound was reduced between two sessions of the run; this will not happen again",
    "timeout": "answers take longer than staleness.group_timeout_s: increase it, or reduce sampling.max_new_tokens",
    "too_few_scores": "scoring fails: see {logs} and reward.timeout_s. If safety stages refused the answers, the "
    "counters safety_* in metrics.jsonl contain their number",
    "verdict": "scoring fails, and reward.on_failure drops the group: see {logs}",
    "rejected": "prompts leave no room for an answer (increase rollout.engine.max_context, or shorten the prompts), or "
    "a workflow or a teacher failed; the rows of kind `dropped` in metrics.jsonl contain the reasons",
    "refused": "safety stages refuse prompts: change rollout.safety, or clean the rows of data.train; the rows of kind "
    "`dropped` in metrics.jsonl contain the names of the stages",
    "lost_too_often": "rollout workers crash while they generate these samples (see the logs of the workers), or an "
    "external teacher does not answer; the rows of kind `dropped` in metrics.jsonl contain the reasons",
}
"""By the beginning of the reason; `{logs}` is replaced by the logs of scoring."""
NO_REWARD_ADVICE = (
    "the workflow gives no reward: check rollout.workflow_options and {logs}. If safety stages refused the answers, "
    "the counters safety_* in metrics.jsonl contain their number"
)
"""For failed scores in a run without a reward service."""

Look = Callable[[RunData, Shares], list[Rated]]


def find(data: RunData, shares: Shares) -> list[Rated]:
    """All findings, in any order."""
    return [rated for look in LOOKS for rated in look(data, shares)]


# ------------------------------------------------------------ invariants and lost work


def _audit(data: RunData, shares: Shares) -> list[Rated]:
    words = data.summary.get("audit") if data.summary else None
    if not isinstance(words, str) or words == "clean":
        return []
    if words.startswith("not possible"):
        advice = "Check whether ledger.sqlite is intact"
        finding = Finding("audit_impossible", "warning", "The ledger could not be audited", words, advice)
    else:
        finding = Finding(
            "audit_broken",
            "bad",
            "The audit of the ledger failed: an invariant was violated, so the figures in this report are not reliable",
            words,
            "Keep this folder and report the problem, which is a bug in the program and not an error in the "
            "configuration",
        )
    return [Rated(Weight.AUDIT, finding)]


def _dropped(data: RunData, shares: Shares) -> list[Rated]:
    reasons, drawn = _drop_counts(data)
    total = sum(reasons.values())
    if not drawn or total / drawn < DROPPED_NOTABLE:
        return []
    share = total / drawn
    reason, number_of = max(reasons.items(), key=lambda item: item[1])
    listed = ", ".join(f"{count} {name}" for name, count in sorted(reasons.items(), key=lambda item: -item[1]))
    near = _stale_words(data) if reason.startswith("stale") else ""
    finding = Finding(
        "groups_dropped",
        "bad" if share >= DROPPED_BAD else "warning",
        f"{percent(share)} of all groups were dropped; most common reason: {reason} ({number_of:,})",
        sentences(f"By reason: {listed}", near),
        drop_advice(data, reason, otherwise="see logs/controller.log"),
        f"Without drops, the same generation work would produce up to {percent(1 / max(1 - share, 0.01) - 1)} more "
        "batches",
    )
    return [Rated(Weight.LOSS, finding, share)]


def drop_advice(data: RunData, reason: str, *, otherwise: str) -> str:
    """What to change if groups are dropped for this reason; `otherwise` if the reason has no advice."""
    known = next((key for key in DROP_ADVICE if reason.startswith(key)), "")
    words = DROP_ADVICE.get(known, otherwise)
    if known in ("too_few_scores", "verdict") and not has_reward_service(data):
        words = NO_REWARD_ADVICE
    return capital(words.replace("{logs}", scoring_logs(data)))


def _drop_counts(data: RunData) -> tuple[dict[str, int], float]:
    """Groups dropped by reason, and groups drawn."""
    summary = data.summary or {}
    if isinstance(found := summary.get("dropped_by_reason"), dict) and found:
        reasons = {str(key): int(number(found, key, 0.0)) for key in found}
        return reasons, number(summary, "groups_drawn", 0.0)
    if data.samples is not None:
        return data.samples.dropped_by_reason, float(sum(data.samples.fates.values()))
    counts = data.pulses[-1]["counts"] if data.pulses else {}
    return dict(Counter(str(row.get("reason", "?")) for row in data.dropped)), number(counts, "drawn", 0.0)


def _stale_words(data: RunData) -> str:
    bound = data.setting("staleness.max_staleness")
    stale = series(data.steps, "staleness_mean")
    if not isinstance(bound, int) or not np.isfinite(stale).any():
        return ""
    mean = float(np.nanmean(stale))
    near = ", which is close" if bound and mean >= STALE_NEAR * bound else ""
    return f"Consumed groups were {figure(mean)} versions old on average; the bound is {bound}{near}"


# ------------------------------------------------------------ processes and memory


def _processes(data: RunData, shares: Shares) -> list[Rated]:
    losses = [(row.get("name"), row.get("reason")) for row in data.processes if row.get("event") in ("lost", "gone")]
    names_of = {
        event: {str(row.get("name")) for row in data.processes if row.get("event") == event}
        for event in ("gone", "joined")
    }
    gone = sorted(names_of["gone"] - names_of["joined"])  # workers that joined may leave at any time
    if not data.processes:  # in an older layout lost workers are only in notes
        texts = [str(row.get("text")) for row in data.notes if row.get("note") == "worker_lost"]
        losses = [(text.split(" ")[0], text) for text in texts if "the run is over" not in text]
    if not losses:
        return []
    names = Counter(str(name) for name, _ in losses)
    most, times = names.most_common(1)[0]
    severity: Severity = "bad" if gone or times >= RESTARTS_BAD else "warning"
    what = f"{', '.join(gone)} lost and not restarted" if gone else f"{most} most often ({times})"
    title = f"Processes were lost {plural(len(losses), 'time')}: {what}"
    if len(losses) == 1:
        title = f"The process {most} was lost" + (" and not restarted" if gone else "")
    reasons = list(dict.fromkeys(str(reason) for _, reason in losses if reason))[:3]
    finding = Finding(
        "processes_lost",
        severity,
        title,
        sentences(f"Reasons: {'; '.join(reasons)}" if reasons else ""),
        f"See logs/{most}.log; if the kernel killed the process, check its memory use",
    )
    return [Rated(Weight.MACHINE, finding, len(losses))]


def _scaled(data: RunData, shares: Shares) -> list[Rated]:
    """Decisions of autoscaling, and whether its limit was in the way."""
    texts = {kind: [str(row.get("text")) for row in data.notes if row.get("note") == kind] for kind in _SCALING}
    changes, limits = texts["scaled"], texts["scale_limit"]
    if not changes and not limits:
        return []
    title = f"Autoscaling changed the number of rollout workers {plural(len(changes), 'time')}"
    advice = ""
    if limits:
        title += ", and would have added more" if changes else ", because the limit is reached"
        advice = "Increase rollout.autoscale.max_workers if there are devices for more workers"
    shown = [*changes[-3:], *limits[-1:]]
    finding = Finding(
        "workers_scaled", "warning" if limits else "info", title, sentences(*(capital(text) for text in shown)), advice
    )
    return [Rated(Weight.MACHINE, finding, len(changes))]


_SCALING = ("scaled", "scale_limit")


def _quarantine(data: RunData, shares: Shares) -> list[Rated]:
    texts = [str(row.get("text")) for row in data.notes if row.get("note") == "quarantined"]
    if not texts:
        return []
    finding = Finding(
        "version_not_loaded", "bad",
        f"A rollout worker could not load new weights ({plural(len(texts), 'time')}); such a worker gets no work until "
        "it loads a later version",
        texts[-1],
        "See the worker's log. Common causes are too little memory and a failed transfer of the weights",
    )  # fmt: skip
    return [Rated(Weight.MACHINE, finding, len(texts))]


def _memory(data: RunData, shares: Shares) -> list[Rated]:
    """Compare the median of the last quarter with that of the third quarter, for each process's last incarnation."""
    found = []
    for name in sorted({name for pulse in data.pulses for name in pulse["processes"]}):
        rows = [pulse["processes"][name] for pulse in data.pulses if name in pulse["processes"]]
        last = rows[-1].get("incarnation")
        sizes = series([row for row in rows if row.get("incarnation") == last], "rss_mb")
        sizes = sizes[np.isfinite(sizes)]
        n = len(sizes)
        if n < MIN_MEMORY_PULSES:
            continue
        middle, end = float(np.median(sizes[n // 2 : 3 * n // 4])), float(np.median(sizes[3 * n // 4 :]))
        if end - middle >= max(MEMORY_MB, MEMORY_GROWTH * middle):
            found.append((end / middle - 1, name, middle, end))
    return [
        Rated(
            Weight.MACHINE,
            Finding(
                "memory_grows",
                "warning",
                f"The memory use of {name} grew from {middle:,.0f} to {end:,.0f} MB in the second half of the run",
                "",
                "Monitor the memory use; to free the memory, stop and resume the run, which starts new processes",
                f"At this rate, the memory use would double in about {figure(0.25 / share)} times the running time of "
                "the process",
            ),
            share,
        )
        for share, name, middle, end in found
    ]


def _staging(data: RunData, shares: Shares) -> list[Rated]:
    stages = series(data.swaps, "stage_s")
    stages = stages[np.isfinite(stages)]
    if shares.load.is_too_much or not len(stages) or not shares.step_s > 0:
        return []
    if np.median(stages) < STAGE_NOTABLE * shares.step_s:
        return []
    share = float(np.median(stages)) / shares.step_s
    finding = Finding(
        "slow_staging",
        "warning",
        f"New weights take {percent(share)} of the time of a step to reach a rollout worker",
        "In the meantime the worker generates with the previous version, so samples are older than necessary",
        capital(", or ".join(["use larger steps (groups_per_step)", *faster_transfers(data)])),
    )
    return [Rated(Weight.MACHINE, finding, share)]


def _disk(data: RunData, shares: Shares) -> list[Rated]:
    is_inside = bool(data.weight_dir) and Path(data.weight_dir).is_relative_to(data.folder.root)
    kind = str(data.setting("trainer.weights.kind", DEFAULT_TRANSFER))
    if not is_inside or kind not in TRANSFERS:  # a report does not import modules of the user
        return []
    if TRANSFERS[kind].sender or TRANSFERS[kind].place == "disk":
        return []
    finding = Finding(
        "weights_on_disk",
        "warning",
        "Weights are transferred through files on disk, because shared memory had too little free space",
        data.weight_dir,
        "Increase the size of /dev/shm (in a container: --shm-size), so that it can hold three versions of the weights",
    )
    return [Rated(Weight.MACHINE, finding)]


def _sinks(data: RunData, shares: Shares) -> list[Rated]:
    last = {str(row.get("sink")): row for row in data.sinks}
    errors = {str(row.get("sink")): str(row.get("error", "")) for row in data.sinks if row.get("event") == "down"}
    found = []
    for name, row in last.items():
        lost, is_down = number(row, "lost", 0.0), row.get("event") == "down"
        if not is_down and not lost:
            continue
        finding = Finding(
            "sink_down",
            "warning",
            f"The metrics sink {name} {'is' if is_down else 'was'} down: {figure(lost)} rows did not reach it",
            errors.get(name, ""),
            "No data is lost, because metrics.jsonl contains every row",
        )
        found.append(Rated(Weight.MACHINE, finding, lost))
    return found


def _packing(data: RunData, shares: Shares) -> list[Rated]:
    rows = [
        row for row in data.steps
        if number(row, "micro_batches", 0.0) >= MIN_MICRO_BATCHES * max(1.0, number(row, "updates", 1.0))
        and not number(row, "forward_only_share", 0.0)
    ]  # fmt: skip
    values = series(rows, "packing_efficiency")
    if len(rows) < max(2, len(data.steps) // 2) or not np.isfinite(values).any():
        return []
    mean = float(np.nanmean(values))
    if mean >= PACKING_LOW:
        return []
    budget = data.setting("trainer.micro_batch_tokens", "?")
    updates = np.maximum(1.0, np.nan_to_num(series(rows, "updates"), nan=1.0))
    counts = series(rows, "micro_batches")
    fewest = updates * np.ceil(values * counts / updates - 1e-9)
    finding = Finding(
        "batches_not_full",
        "info" if np.nanmean(counts - fewest) < 0.5 else "warning",  # as few as this budget allows: only not full
        f"Micro-batches are only {percent(mean)} full: {figure(float(np.nanmean(series(rows, 'micro_batches'))))} per "
        f"step, each with a budget of {budget} tokens",
        "",
        "Increase trainer.micro_batch_tokens, preferably to a multiple of the longest sequence",
        f"This saves at most {percent(1 - mean)} of the trainer's time, if the cost of a micro-batch depends on its "
        "budget",
    )
    return [Rated(Weight.MACHINE, finding, 1 - mean)]


def _damage(data: RunData, shares: Shares) -> list[Rated]:
    if not data.problems:
        return []
    is_old = all("no rows of kind `pulse`" in problem for problem in data.problems)
    finding = Finding(
        "damaged_files",
        "info" if is_old else "warning",
        "Some files of this run are missing, incomplete or damaged",
        sentences("; ".join(data.problems)),
        "" if is_old else "This report is based on the remaining data",
    )
    return [Rated(Weight.REMARK, finding)]


LOOKS: tuple[Look, ...] = (
    _audit, _dropped, _processes, _scaled, _quarantine, _memory, _staging, _disk, _sinks, _packing, _damage,
)  # fmt: skip


def remaining(data: RunData) -> float:
    """Share of the configured steps that is not done; NaN if unknown."""
    steps = number(data.config, "num_steps")
    done = float(data.steps[-1]["step"]) if data.steps else 0.0
    return max(0.0, 1.0 - done / steps) if steps > 0 else math.nan
