"""Findings about waits between trainer, rollout workers and reward service.

Determines the cause of a wait from the shares. Measurements are in shares.py, predictions in advice.py.

    trainer waits | rollout workers        | cause
    yes           | work                   | too few of them, or of their slots
    yes           | idle, samples scored   | the reward service stalls
    yes           | idle, no work          | the bound prevents the two from overlapping
    no            | idle                   | the trainer is the bottleneck, the bound limits rollouts
    no            | work                   | well balanced

A wait for a core that other programs used is not the run's: its share is removed first (machine_load.py), and where it
is most of the time, no wait is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from controller.report import advice
from controller.report.advice import Pace
from controller.report.data import RunData, number
from controller.report.finding import Finding, Rated, Severity, Weight, capital, figure, percent, plural, sentences
from controller.report.minimum import MIN_PULSES, MIN_STEPS
from controller.report.shares import Shares

MIN_STEADY_STEPS = 3
"""Minimum steps of the steady part of a run for shares of time."""
WAIT_NOTABLE = 0.20
"""The trainer's device is idle for a fifth of the time: balanced runs on a machine with other work reach 0.16."""
WAIT_BAD = 0.50
"""More than half of the trainer's time is wasted."""
IDLE_NOTABLE = 0.40
"""A smaller idle share of rollout workers is a useful margin for long answers and swaps."""
IDLE_ALONE = 0.60
"""The same if no worker can be removed (a single one): the device is idle most of the time."""
BOTH_IDLE = 0.25
"""Below this idle share, while the trainer waits, rollout workers are not the cause."""
SLOTS_EMPTY = 0.25
"""Below this mean share of used slots, the wait is for the longest answers, not for slots ..."""
IDLE_EMPTY = 0.10
"""... if rollout workers are idle for this share of the time."""
SCORE_IDLE = 0.20
"""Share of rollout time without generation because scores are missing; during generation, waits for scores cost
nothing.
"""
SCORE_WAITING = 0.50
"""More samples wait for their score than are being generated ..."""
SCORING_BUSY = 0.20
"""Scoring processes that are busy less than this, without failures, are not the cause of a wait."""
SCORING_FULL = 0.80
"""... while the scoring processes have no time left: they set the pace."""
FAILED_NOTABLE = 0.02
"""One answer in fifty without a score: a group of eight loses a sample every sixth time."""
FAILED_BAD = 0.20
MIN_VERDICTS = 20
MIN_FAILED = 3
"""Minimum number of verdicts, and of failures among them, for a share of failures: a single failure in a short run is
not significant.
"""
PAUSED_NOTABLE = 0.10
"""Share of rollout time spent in weight swaps; AReaL (arXiv 2505.24298) reports a few per cent."""
CORES_FULL = 0.90
"""Share of busy cores of this machine above which a wait is also a wait for a core."""
MAX_NAMES = 5
STEADY = "These fractions of time do not include the start and the end of the run"
PARTIAL = "They do not include the time during which other programs used most of the machine"
FAILURES = ("timed_out", "crashed", "invalid")


def find(data: RunData, shares: Shares) -> list[Rated]:
    """At most one cause of the waits, if there is enough data, and problems of scores and swaps."""
    pace = advice.pace_of(data, shares)
    can_judge = shares.steps >= (MIN_STEADY_STEPS if shares.is_steady else MIN_STEPS)
    is_notable = shares.trainer_wait >= WAIT_NOTABLE
    if shares.load.is_too_much:
        return [*([_busy_machine(shares, is_judged=False)] if is_notable else []), *_failing_scores(data, shares)]
    is_stalled = _stalled_scores(data, shares, pace) if can_judge or shares.num_pulses >= MIN_PULSES else None
    if is_stalled is not None:
        return [is_stalled, *_swaps(data, shares)]
    wait = _wait(data, shares, pace) if can_judge else None
    if wait is not None:
        scope = sentences(STEADY if shares.is_steady else "", PARTIAL if shares.load.is_partial else "")
        detail = sentences(wait.finding.detail, _full_cores(shares), scope)
        wait = replace(wait, finding=replace(wait.finding, detail=detail))
    elif is_notable and (shares.load.is_partial or (can_judge and shares.load.on_the_way > 0)):
        wait = _busy_machine(shares, is_judged=can_judge)
    return [*([wait] if wait else []), *_failing_scores(data, shares), *_swaps(data, shares)]


def _busy_machine(shares: Shares, *, is_judged: bool) -> Rated:
    """Other programs explain what would otherwise be a finding, or (not is_judged) nothing can be said of waits: then
    it is the verdict, and has the weight of a wait.
    """
    load = shares.load
    without = percent(load.trainer_wait(shares.trainer_wait))
    finding = Finding(
        "machine_busy",
        "info",
        f"Other programs used {load.others:.1f} of the {shares.cores:g} cores of this machine: waits for a core "
        f"delayed the samples during {percent(load.on_the_way)} of the time",
        f"Without them the trainer would have waited during {without} of its time instead of "
        f"{percent(shares.trainer_wait)}"
        if is_judged
        else "Waits between the processes of the run are therefore not evaluated",
        "Stop the other programs, or run the job on a machine without them, to see what limits it",
    )
    return Rated(Weight.REMARK if is_judged else Weight.WAIT, finding, load.on_the_way)


# ------------------------------------------------------------ trainer and rollouts


def _wait(data: RunData, shares: Shares, pace: Pace) -> Rated | None:
    is_waiting = shares.load.trainer_wait(shares.trainer_wait) >= WAIT_NOTABLE
    is_idle = shares.rollout_idle >= IDLE_NOTABLE
    if _alternates(data):
        return _no_overlap(data, shares, pace) if is_waiting or is_idle else None
    if is_waiting:
        return (_no_overlap if _is_held_back(shares) else _too_few_rollouts)(data, shares, pace)
    if not is_idle or not shares.trainer_wait < WAIT_NOTABLE:
        return None
    is_wasteful = advice.workers_at_work(shares, pace) < pace.workers or shares.rollout_idle >= IDLE_ALONE
    return _trainer_bound(data, shares, pace) if is_wasteful else None


def _is_held_back(shares: Shares) -> bool:
    """Return whether the bound limits rollout workers while the trainer waits for them.

    Either their idle share explains the trainer's wait, or it is notable while most slots are empty, so that more slots
    or workers would be empty too. A worker that waits for scores, or for the machine, is not limited by the bound.
    """
    idle = shares.rollout_idle if math.isnan(shares.idle_for_work) else shares.idle_for_work
    is_empty = shares.slots_full < SLOTS_EMPTY and idle >= IDLE_EMPTY
    return idle >= max(BOTH_IDLE, 0.5 * shares.trainer_wait) or is_empty


def _full_cores(shares: Shares) -> str:
    """Sentence about the use of the machine's cores, if hardly any was idle."""
    at_work = sum(shares.cores_used.values())
    if not at_work >= CORES_FULL * shares.cores:
        return ""
    largest = sorted(shares.cores_used.items(), key=lambda item: -item[1])[:MAX_NAMES]
    parts = ", ".join(f"{name} {cores:.2f}" for name, cores in largest)
    return (
        f"The cores of this machine are the bottleneck: on average, {at_work:.2f} of {shares.cores:g} cores were busy "
        f"({parts}), so another process on this machine would slow down the run"
    )


def _alternates(data: RunData) -> bool:
    """Return whether the configuration requires alternation."""
    return data.setting("mode") in ("sync", "one_step_off") or data.setting("staleness.max_staleness") == 0


def _too_few_rollouts(data: RunData, shares: Shares, pace: Pace) -> Rated:
    way, hope = advice.more_generation(data, shares, pace) if pace.is_known else ("Add rollout workers or slots", "")
    held = f"{plural(pace.workers, 'worker')} of {plural(pace.slots, 'slot')}"
    full = f", {percent(shares.slots_full)} of them full" if math.isfinite(shares.slots_full) else ""
    factor = pace.rollout_s / pace.trainer_s if pace.is_known and pace.trainer_s > 0 else math.nan
    return _rated(
        shares.trainer_wait,
        f"The trainer waited for samples during {percent(shares.trainer_wait)} of its time: there are too few rollout "
        "workers or slots",
        sentences(
            f"Rollout workers were busy during {percent(shares.rollout_working)} of the time ({held}{full}), so "
            "generation "
            "is the slowest part"
            if math.isfinite(shares.rollout_working)
            else f"The run had {held}{full}",
            f"Generation takes {figure(factor)} times as long as training on the same samples" if factor > 1 else "",
        ),
        way,
        hope,
    )


def _no_overlap(data: RunData, shares: Shares, pace: Pace) -> Rated:
    mode, bound = data.setting("mode", "async"), data.setting("staleness.max_staleness")
    way, hope = advice.looser_bound(data, pace)
    why = f"mode {mode}" if mode != "async" else f"max_staleness {bound}"
    title = (
        f"Trainer and rollout workers wait for each other ({why}): the trainer waited during "
        f"{percent(shares.trainer_wait)} of its time, rollout workers during {percent(shares.rollout_idle)}"
    )
    detail = (
        "This is expected: in this mode, generation and training alternate"
        if _alternates(data)
        else "New groups cannot start until a version is published, and it waits for the last answers of a step"
    )
    severity: Severity = "info" if _alternates(data) else "warning"
    return Rated(Weight.WAIT, Finding("no_overlap", severity, title, sentences(detail), way, hope), shares.trainer_wait)


def _trainer_bound(data: RunData, shares: Shares, pace: Pace) -> Rated:
    bound = data.setting("staleness.max_staleness")
    held = f", held back by the staleness bound ({bound})" if isinstance(bound, int) else ""
    way, hope = advice.fewer_rollouts(data, shares, pace)
    is_many = advice.workers_at_work(shares, pace) < pace.workers
    could = figure(1 / max(shares.rollout_working, 0.01))
    finding = Finding(
        "trainer_bound",
        "warning",
        f"Rollout workers were idle during {percent(shares.rollout_idle)} of their time{held}: the trainer is the "
        "bottleneck" + (", and there are more rollout workers than it needs" if is_many else ""),
        f"The trainer was busy during {percent(1 - shares.trainer_wait)} of its time; "
        f"{plural(pace.workers, 'rollout worker')} "
        f"could generate {could} times as many samples as the trainer uses.",
        way,
        hope,
    )
    return Rated(Weight.WAIT, finding, shares.rollout_idle)


def _rated(wait: float, title: str, detail: str, way: str, hope: str) -> Rated:
    severity: Severity = "bad" if wait >= WAIT_BAD else "warning"
    return Rated(Weight.WAIT, Finding("rollouts_too_few", severity, title, detail, way, hope), wait)


# ------------------------------------------------------------ scores


def verdicts(data: RunData, shares: Shares) -> dict[str, float]:
    """Verdicts by kind: as counted by the reward service, else by the ledger."""
    counted = {kind: shares.verdicts.get(kind, 0.0) for kind in ("scored", *FAILURES)}
    if sum(counted.values()) > 0:
        return counted
    stored = data.samples.verdicts if data.samples else {}
    return {kind: float(stored.get(kind, 0)) for kind in ("scored", *FAILURES)}


def _failed_share(counted: Mapping[str, float]) -> float:
    total = sum(counted.values())
    return sum(counted[kind] for kind in FAILURES) / total if total else 0.0


def _stalled_scores(data: RunData, shares: Shares, pace: Pace) -> Rated | None:
    """The trainer waits, but not for generation."""
    trainer_wait = shares.load.trainer_wait(shares.trainer_wait)
    scoring_busy = shares.load.without(shares.scoring_busy, "reward")
    is_hungry = math.isnan(trainer_wait) or trainer_wait >= WAIT_NOTABLE
    counted = verdicts(data, shares)
    failed = _failed_share(counted)
    if scoring_busy < SCORING_BUSY and failed < FAILED_NOTABLE:  # then the scorer is not the cause
        return None
    is_starved = shares.load.without(shares.idle_for_scores, "reward") >= SCORE_IDLE
    is_full = shares.waiting_for_score >= SCORE_WAITING and scoring_busy >= SCORING_FULL
    is_unknown = math.isnan(shares.idle_for_scores) and shares.waiting_for_score >= SCORE_WAITING
    is_unknown = is_unknown and failed >= FAILED_NOTABLE
    if not is_hungry or not (is_starved or is_full or is_unknown):
        return None
    name = _culprit(data, shares)
    way, hope = advice.more_scoring(pace, failures=advice.scoring_logs(data) if failed >= FAILED_NOTABLE else "")
    is_bad = failed >= FAILED_BAD or not shares.trainer_wait < WAIT_BAD
    title = (
        f"Scoring slows down the run: {percent(shares.waiting_for_score)} of the samples held by the workers are "
        f"waiting for a score ({name})"
    )
    detail = sentences(
        f"The trainer waited during {percent(shares.trainer_wait)} of its time, and rollout workers were idle during "
        f"{percent(shares.rollout_idle)}, so the cause is not a lack of rollout workers",
        _verdict_words(counted),
        f"The scoring processes ({pace.scorers}) were busy during {percent(shares.scoring_busy)} of the time"
        if math.isfinite(shares.scoring_busy)
        else "",
        _latency_words(data, name),
    )
    finding = Finding("scoring_stalls", "bad" if is_bad else "warning", title, detail, way, hope)
    return Rated(Weight.REWARD, finding, max(failed, shares.waiting_for_score))


def _failing_scores(data: RunData, shares: Shares) -> list[Rated]:
    """Answers without a score, whether or not a process waits for them."""
    counted = verdicts(data, shares)
    failed = _failed_share(counted)
    total = sum(counted.values())
    if failed < FAILED_NOTABLE or total < MIN_VERDICTS or failed * total < MIN_FAILED:
        return []
    kind = max(FAILURES, key=lambda kind: counted[kind])
    logs = advice.scoring_logs(data)
    advised = {
        "timed_out": "Make the scorer faster, or increase reward.timeout_s; each timeout also kills a scoring process",
        "crashed": f"Fix the scorer; the errors are in {logs}",
        "invalid": f"The scorer cannot score these answers; check the columns that it reads (for reasons, see {logs})",
    }[kind]
    if not advice.has_reward_service(data):
        advised = f"The workflow gives no reward for these answers; check rollout.workflow_options and {logs}"
    title = f"{percent(failed)} of the answers got no score ({kind.replace('_', ' ')}: {_culprit(data, shares)})"
    finding = Finding(
        "scoring_fails",
        "bad" if failed >= FAILED_BAD else "warning",
        title,
        sentences(_verdict_words(counted), _policy_words(data)),
        advised,
    )
    return [Rated(Weight.REWARD, finding, failed)]


def _policy_words(data: RunData) -> str:
    """Handling of the answers without a score: as counted in the ledger, else as configured."""
    done: dict[str, int] = {}
    for (_, _, policy), count in (data.samples.failures if data.samples else {}).items():
        done[policy] = done.get(policy, 0) + count
    policy = data.setting("reward.on_failure", "drop_sample")
    teaches = "so the policy learns from failures of the scorer"
    if not any(done.values()) or "" in done:
        if isinstance(policy, int | float):
            return f"They count as a reward of {policy} (reward.on_failure), {teaches}"
        return f"reward.on_failure: {policy}"
    words = {"drop_sample": "dropped", "drop_group": "dropped with their group", "value": f"given a value, {teaches}"}
    return "Of those in the ledger " + ", ".join(f"{figure(n)} were {words[name]}" for name, n in sorted(done.items()))


def _culprit(data: RunData, shares: Shares) -> str:
    """The scorer that fails most often, else the one that takes most time, else the first of the configuration."""
    failures: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for key, value in shares.verdicts.items():
        if not key.startswith("scorer."):
            continue
        name, _, what = key.removeprefix("scorer.").rpartition(".")
        if what in FAILURES:
            failures[name] = failures.get(name, 0.0) + value
        elif what == "busy_s":
            seconds[name] = value
    for table in (failures, seconds):
        if table and max(table.values()) > 0:
            return f"scorer {max(table, key=lambda name: table[name])}"
    scorers = data.setting("reward.scorers", [])
    kinds = [str(one.get("kind")) for one in scorers if isinstance(one, dict)] if isinstance(scorers, list) else []
    if kinds:
        return f"scorer {', '.join(kinds)}"
    return "the reward service" if advice.has_reward_service(data) else "the workflow"


def _verdict_words(counted: Mapping[str, float]) -> str:
    total = sum(counted.values())
    if not total:
        return "No verdict arrived"
    listed = [f"{figure(counted[kind])} {kind.replace('_', ' ')}" for kind in counted if counted[kind]]
    return f"Verdicts: {', '.join(listed)}"


def _latency_words(data: RunData, name: str) -> str:
    """Latency of the named scorer, from the last pulse."""
    key = name.removeprefix("scorer ")
    for pulse in reversed(data.pulses):
        for process in pulse["processes"].values():
            p95_s = number(process["counters"], f"scorer.{key}.p95_s")
            if process.get("role") == "reward" and math.isfinite(p95_s):
                return f"95 % of its scores took up to {figure(p95_s)} s"
    return ""


# ------------------------------------------------------------ swaps


def _swaps(data: RunData, shares: Shares) -> list[Rated]:
    if not shares.rollout_paused >= PAUSED_NOTABLE:
        return []
    pauses = sorted(value for row in data.swaps if math.isfinite(value := number(row, "pause_s")))
    ways = ["swap weights less often (larger groups_per_step)", *advice.faster_transfers(data)]
    if data.setting("rollout.interruption") != "keep_kv":
        ways.append("try rollout.interruption: keep_kv, which avoids a second prefill of interrupted answers")
    median = f"half of the {len(pauses)} swaps took over {figure(pauses[len(pauses) // 2])} s" if pauses else ""
    finding = Finding(
        "slow_swaps",
        "warning",
        f"Weight swaps are slow: they paused rollout workers during {percent(shares.rollout_paused)} of the time",
        sentences(median),
        capital(", or ".join(ways)),
    )
    return [Rated(Weight.MACHINE, finding, shares.rollout_paused)]
