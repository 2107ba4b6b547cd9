"""Shares of time of each part of a run, computed from the pulses.

Thresholds are in waits.py.

Time in which other programs kept most of the machine (machine_load.py) is left out, if enough remains.

The steady part of the run is used: after the first step (before it everything waits for the start, the first evaluation
and the first batch) and before the last group was started (after that rollout workers have no more work). Counters
start at zero with each incarnation of a process; values of previous incarnations are kept.

Shares are of the processes' own time and comparable across machines; absolute times are not.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_like.errors import UserError
from controller.report.cores import available, used
from controller.report.data import Row, RunData, number, series
from controller.report.machine_load import MachineLoad
from controller.report.machine_load import measure as measure_load
from controller.run_folder.run_folder import RunFolder

MIN_STEPS = 3
"""With fewer steps in the steady part, the whole run is used."""
MIN_PAIRS = 4
"""With fewer pairs of pulses on a machine that is free enough, the others are used too."""
Pair = tuple[Row, Row]
"""Two consecutive pulses."""
SCORING = ("busy_workers", "running")
"""Gauge of busy scoring processes: its present name and its name in older runs."""
NAN = math.nan


@dataclass(frozen=True)
class Shares:
    """Shares of time, 0 to 1, NaN if not known. Rollout shares are means over the workers."""

    steps: int = 0
    """Steps that were measured."""
    wall_s: float = 0.0
    num_pulses: int = 0
    is_steady: bool = False
    """False if the start or the end of the run is included."""
    trainer_wait: float = NAN
    rollout_busy: float = NAN
    rollout_paused: float = NAN
    rollout_idle: float = NAN
    idle_for_scores: float = NAN
    """Nothing is generated, and a sample waits for its score."""
    idle_for_work: float = NAN
    """No work at all."""
    slots_full: float = NAN
    """Mean share of slots in use while generating."""
    scoring_busy: float = NAN
    """Mean share of busy scoring processes."""
    waiting_for_score: float = NAN
    """Share of the workers' samples that wait for their score."""
    rollout_workers: float = NAN
    """Mean number of rollout workers."""
    cores: float = NAN
    """Cores of this machine that the run may use; NaN if its processes are on several machines."""
    cores_used: dict[str, float] = field(default_factory=dict)
    """Mean number of cores by process, including its child processes; empty if not known."""
    load: MachineLoad = field(default_factory=MachineLoad)
    """Load of the machine by other programs; zero if unknown, or if the processes are on several machines."""
    verdicts: dict[str, float] = field(default_factory=dict)
    """Growth of the reward service's counters."""

    @property
    def step_s(self) -> float:
        """Wall time of a step."""
        return self.wall_s / self.steps if self.steps else NAN

    @property
    def rollout_working(self) -> float:
        """Share of time spent generating or swapping."""
        return self.rollout_busy + self.rollout_paused


def measure(data: RunData) -> Shares:
    """Compute the shares from the pulses, or from steps and summary if there are too few pulses."""
    pulses, is_steady = _steady(data)
    reported = _without_pulses(data)
    if len(pulses) < 2:
        return reported
    cores = available(data)
    pairs, load = list(itertools.pairwise(pulses)), MachineLoad()
    if math.isfinite(cores):
        pairs, load = _undisturbed(pairs)
    later = [pulse for _, pulse in pairs]
    trainer, rollout, reward = (_sum(growth(pair, role) for pair in pairs) for role in ("trainer", "rollout", "reward"))
    wall_s = sum(_elapsed(pair) for pair in pairs)
    waited, worked = trainer.get("wait_s", 0.0), trainer.get("busy_s", 0.0)
    busy, idle, paused = (rollout.get(key, 0.0) for key in ("busy_s", "idle_s", "paused_s"))
    spent = busy + idle + paused
    slots = float(whole(data, "rollout.engine.num_slots", 0))
    in_service = _mean(_gauge(pulse, "reward", ("queue", *SCORING)) for pulse in later)
    return Shares(
        steps=sum(max(0, int(_version(after) - _version(before))) for before, after in pairs),
        wall_s=wall_s,
        num_pulses=len(pairs) + 1,
        is_steady=is_steady,
        trainer_wait=_part(waited, waited + worked)
        if is_steady or math.isnan(reported.trainer_wait)
        else reported.trainer_wait,
        rollout_busy=_part(busy, spent),
        rollout_paused=_part(paused, spent),
        rollout_idle=_part(idle, spent),
        idle_for_scores=_part(rollout["wait_score_s"], spent) if "wait_score_s" in rollout else NAN,
        idle_for_work=_part(rollout["wait_work_s"], spent) if "wait_work_s" in rollout else NAN,
        slots_full=_part(rollout.get("tokens", 0.0), rollout.get("steps", 0.0) * slots),
        scoring_busy=_scoring_busy(data, later, reward.get("busy_s", 0.0), wall_s),
        waiting_for_score=_waiting(rollout, in_service, spent, wall_s),
        rollout_workers=_mean(float(n) for pulse in pulses if (n := _present(pulse, "rollout"))),
        cores=cores,
        cores_used=used(pulses),
        load=load,
        verdicts=_sum(growth(pair, "reward") for pair in itertools.pairwise(pulses)),
    )


def summary_shares(folder: RunFolder, summary: Mapping[str, Any]) -> dict[str, float]:
    """Shares for the summary of a run that has ended, so that it shows the numbers of the diagnosis. Unknown ones are
    left out. summary: its values so far, whose shares are used where nothing else was recorded.
    """
    try:
        data = RunData.load(folder, max_samples=1)
    except (UserError, OSError):
        return {}
    shares = measure(replace(data, summary=dict(summary)))
    found = {
        "trainer_wait_share": shares.trainer_wait,
        "rollout_idle_share": shares.rollout_idle,
        "rollout_paused_share": shares.rollout_paused,
    }
    return {key: round(share, 4) for key, share in found.items() if math.isfinite(share)}


def growth(pulses: Sequence[Row], role: str) -> dict[str, float]:
    """Growth of each counter, summed over the processes of a role and their incarnations."""
    first: dict[tuple[str, str], Mapping[str, float]] = {}
    last: dict[tuple[str, str], Mapping[str, float]] = {}
    for place, pulse in enumerate(pulses):
        for name, process in pulse["processes"].items():
            if process.get("role") == role and process["counters"]:
                life = name, str(process.get("incarnation", ""))
                first.setdefault(life, process["counters"] if place == 0 else {})
                last[life] = process["counters"]
    total: defaultdict[str, float] = defaultdict(float)
    for life, counters in last.items():
        for key in counters:
            total[key] += max(0.0, number(counters, key, 0.0) - number(first[life], key, 0.0))
    return dict(total)


# ------------------------------------------------------------ inside


def _steady(data: RunData) -> tuple[list[Row], bool]:
    """The pulses to use, and whether start and end are left out."""
    pulses = [pulse for pulse in data.pulses if pulse["processes"]]
    if not pulses:
        return [], False
    base = max(0.0, number(pulses[0], "version", 0.0))
    needed = whole(data, "num_steps", 0) * whole(data, "groups_per_step", 0)
    begun = [pulse for pulse in pulses if number(pulse, "version", -1.0) > base]
    steady = [pulse for pulse in begun if not needed or _started(pulse) < needed]
    if len(steady) >= 2 and number(steady[-1], "version") - number(steady[0], "version") >= MIN_STEPS:
        return steady, True
    return pulses, False


def _undisturbed(pairs: list[Pair]) -> tuple[list[Pair], MachineLoad]:
    """The pairs of pulses between which other programs left the run enough of the machine to judge its waits, and the
    load there; all pairs if they are too few.
    """
    free = [pair for pair in pairs if not measure_load([pair]).is_too_much]
    kept = free if len(free) >= MIN_PAIRS else pairs
    return kept, replace(measure_load(kept), is_partial=len(kept) < len(pairs))


def _version(pulse: Row) -> float:
    return max(0.0, number(pulse, "version", 0.0))


def _sum(grown: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for one in grown:
        for key, value in one.items():
            total[key] += value
    return dict(total)


def _started(pulse: Row) -> float:
    counts = pulse["counts"]
    return number(counts, "drawn", 0.0) - number(counts, "filtered", 0.0) - number(counts, "dropped", 0.0)


def _waiting(rollout: Mapping[str, float], in_service: float, spent_s: float, wall_s: float) -> float:
    """Samples waiting for a score relative to all waiting or being generated, as means over time.

    Finished waits are counted by the workers, unfinished ones by the service (a hanging service finishes none).
    """
    generating = _part(rollout.get("tokens", 0.0), rollout.get("steps", 0.0))
    if not wall_s > 0 or not spent_s > 0:
        return NAN
    generating = (0.0 if math.isnan(generating) else generating) * rollout.get("busy_s", 0.0) / wall_s
    finished = rollout.get("score_wait_s", 0.0) / wall_s
    waiting = max(finished, 0.0 if math.isnan(in_service) else in_service)
    return _part(waiting, waiting + generating)


def _without_pulses(data: RunData) -> Shares:
    """Shares from steps and summary alone, without the first step if there are others."""
    rows = data.steps[1:] if len(data.steps) > MIN_STEPS else data.steps
    times, waits = series(data.steps, "wall_s"), series(rows, "trainer_wait_share")
    took = np.diff(times)[-len(rows) :] if len(times) > len(rows) else np.diff(times, prepend=0.0)
    known = np.isfinite(waits) & np.isfinite(took) & (took > 0)
    wait = float(np.average(waits[known], weights=took[known])) if known.any() else NAN
    summary = data.summary
    idle, paused = number(summary, "rollout_idle_share"), number(summary, "rollout_paused_share")
    return Shares(
        steps=len(rows),
        wall_s=float(took[known].sum()) if known.any() else 0.0,
        trainer_wait=number(summary, "trainer_wait_share") if math.isnan(wait) else wait,
        rollout_busy=1.0 - idle - paused,
        rollout_paused=paused,
        rollout_idle=idle,
        waiting_for_score=_score_share(data),
    )


def _score_share(data: RunData) -> float:
    """Share of the time between lease and score of a consumed sample that was spent waiting for the score."""
    timings = data.samples.timings_s if data.samples else {}
    return _part(timings.get("score_s", 0.0), sum(timings.get(key, 0.0) for key in ("generate_s", "score_s")))


def _gauge(pulse: Row, role: str, keys: Sequence[str]) -> float:
    found = [
        number(process["counters"], key)
        for process in pulse["processes"].values()
        if process.get("role") == role
        for key in keys
    ]
    return float(np.nansum(found)) if found and not all(map(math.isnan, found)) else NAN


def _present(pulse: Row, role: str) -> int:
    return sum(process.get("role") == role and bool(process["counters"]) for process in pulse["processes"].values())


def _mean(values: Iterable[float]) -> float:
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else NAN


def _scoring_busy(data: RunData, pulses: Sequence[Row], busy_s: float, wall_s: float) -> float:
    """Share of the scoring processes' time that they scored. busy_s: seconds of all scores that ended in `wall_s`.

    The number of busy processes is only known at the pulses. In a short run of short answers these can all fall into
    the moments of scoring, and the time of the scores shows that there was little of it. Scores that have not ended are
    only in the number, which stands alone as long as no score has ended.
    """
    processes = float(whole(data, "reward.num_workers", 1) * whole(data, "reward.num_services", 1))
    sampled = _part(_mean(_gauge(pulse, "reward", SCORING) for pulse in pulses), processes)
    return min(sampled, _part(busy_s, wall_s * processes)) if busy_s > 0 and wall_s > 0 else sampled


def _part(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else NAN


def _elapsed(pulses: Sequence[Row]) -> float:
    """Seconds of wall clock from the first pulse to the last, without the time between two sessions of a run."""
    elapsed_s = 0.0
    for earlier, later in itertools.pairwise(pulses):
        if number(later, "wall_s", 0.0) >= number(earlier, "wall_s", 0.0):
            elapsed_s += max(0.0, number(later, "time_s", 0.0) - number(earlier, "time_s", 0.0))
    return elapsed_s


def whole(data: RunData, path: str, default: int) -> int:
    """A non-negative integer of the configuration; `default` for anything else."""
    value = data.setting(path, default)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
