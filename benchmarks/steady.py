"""Figures of a run in its steady state: rates, idle shares, and for emulated devices lateness and the split's bound.

Also decides which steps are counted. Runs are started in runs.py and compared in the benchmarks.

Rates of emulated devices are per emulated second, in emulated tokens. `bound_share` is the rate over the rate of the
pool with more work if it never waited: the trainer with the sum of its steps' own times, the rollout workers decoding
full batches without a pause; on real devices both with the processor time that they need when they take turns
(`alone`). `late_share` is the machine's distortion of an emulation: the trainer's lateness, and twice the mean lateness
of an engine's wake-up per step (the last answer, and the next version), over the time of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.emulation.device import lengths_of, roofline_of, slots_of
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.report.cores import used
from controller.report.data import RunData
from controller.report.shares import growth
from controller.run_folder.run_folder import RunFolder
from trainer.data.dealing import GRADIENT_PASSES

MAX_LATE_SHARE = 0.05
"""An emulated run distorted by more than this is not published."""
FEWEST_STEPS = 3
"""One step to begin at, and two that are counted."""
FEWEST_PULSES = 3
"""Smallest number of pulses. Shares of time are measured from the first to the last; a run writes one per second."""
Row = dict[str, Any]


def figures(folder: Path, window: tuple[int, int] | None = None) -> Row:
    """Figures of a finished run without its start and its end. window: steps to use (left out at the start, last one
    counted).

    Without a window, a fifth of the steps is left out at the start, but at least one more than the bound lets the run
    be ahead (the first batches take the answers that are ready first, which are the shortest, and the next batch has
    the remaining ones). At the end as many are left out as the bound lets it be ahead, since nothing is left to
    generate.
    """
    data = _settled(folder)
    config = load_config(str(folder)).config
    ahead = config.staleness.bound or 0
    if window is None:
        first, last = window_of(len(data.steps) - ahead, ahead)
        first = min(first, len(data.steps) - 2)
        window = first, max(first + 2, last)
    first, last = window
    begin, counted = data.steps[first - 1], data.steps[first:last]
    wall_s = counted[-1]["wall_s"] - begin["wall_s"]
    samples = sum(step["num_samples"] for step in counted)
    tokens = sum(step["num_sampled_tokens"] for step in counted)
    emulation = config.emulation
    speedup, scale = (emulation.speedup, emulation.token_scale) if emulation else (1.0, 1)
    pulses = pulses_of(data.pulses, begin["wall_s"], counted[-1]["wall_s"])
    row: Row = {
        "steps_counted": len(counted),
        "samples_per_s": samples / wall_s / speedup,
        "tokens_per_s": tokens * scale / wall_s / speedup,
        "step_s": wall_s * speedup / len(counted),
        "step_work": sum(map(work, counted)) / len(counted),
        "step_sampled": tokens * scale / len(counted),
        **_idle(pulses),
        "cores_used": None if emulation else sum(used(pulses).values()) or None,
        "staleness_mean": statistics.fmean(step.get("staleness_mean", 0.0) for step in counted),
    }
    if emulation is not None:
        row |= _emulated(config, data, counted, wall_s, tokens)
    return row


def pulses_of(pulses: Sequence[Row], begin_s: float, end_s: float) -> list[Row]:
    """Pulses within a window, and one more on either side if they are too few for a share of time."""
    inside = [pulse for pulse in pulses if begin_s <= pulse["wall_s"] <= end_s]
    if len(inside) >= FEWEST_PULSES:
        return inside
    before = [pulse for pulse in pulses if pulse["wall_s"] < begin_s]
    after = [pulse for pulse in pulses if pulse["wall_s"] > end_s]
    return [*before[-1:], *inside, *after[:1]]


def window_of(num_steps: int, ahead: int) -> tuple[int, int]:
    """Counted steps of a run that has `ahead` more than num_steps: (left out at the start, last one counted)."""
    return max(1, num_steps // 5, ahead + 1), num_steps


def alone(folder: Path) -> Row:
    """Processor seconds per token of a trainer and of a rollout worker that took turns (`sync`).

    Computed from heartbeats, which report both numbers at the same time, from the end of the first step on. The
    worker's figure includes the end of every batch, when few slots are busy: use batches of several times its slots.
    The trainer's is for a token with forward and backward pass (`work`).
    """
    data = _settled(folder)
    pulses = [pulse for pulse in data.pulses if pulse["processes"] and pulse.get("version", 0) >= 1]
    trainer, rollout = growth(pulses, "trainer"), growth(pulses, "rollout")
    if not (trainer.get("tokens") and rollout.get("tokens")):
        raise SystemExit(f"{folder}: too short to measure the costs of its processes: raise num_steps")
    worked = sum(map(work, data.steps)) / sum(step["tokens"] for step in data.steps)
    return {
        "trainer_token_s": trainer["cpu_s"] / trainer["tokens"] / worked,
        "rollout_token_s": rollout["cpu_s"] / rollout["tokens"],
    }


def work(step: Mapping[str, float]) -> float:
    """Number of tokens with forward and backward pass that would take as long as this step."""
    saved = 1 - 1 / GRADIENT_PASSES
    return step.get("tokens", 0.0) * (1 - saved * step.get("forward_only_share", 0.0))


def _settled(folder: Path) -> RunData:
    """The run's data. Raises SystemExit if it has too few steps for a rate."""
    data = RunData.load(RunFolder(folder), max_samples=1)
    if len(data.steps) < FEWEST_STEPS:
        raise SystemExit(
            f"{folder}: a rate needs {FEWEST_STEPS} steps, but this run has {len(data.steps)}: use a longer one, or "
            "raise num_steps"
        )
    return data


def refuse_distorted(row: Row, folder: Path) -> None:
    """Raise SystemExit for an emulated run for which the machine was too busy."""
    late = row.get("late_share")
    if late is not None and late > MAX_LATE_SHARE:
        raise SystemExit(
            f"{folder}: the machine was too busy, its lateness distorts this emulation by {late:.1%}: end other "
            "processes, or give a smaller emulation.speedup"
        )


def _idle(pulses: Sequence[Row]) -> Row:
    """Shares of time between the first pulse and the last."""
    trainer, rollout = growth(pulses, "trainer"), growth(pulses, "rollout")
    waited, worked = trainer.get("wait_s", 0.0), trainer.get("busy_s", 0.0)
    busy, idle, paused = (rollout.get(key, 0.0) for key in ("busy_s", "idle_s", "paused_s"))
    spent = busy + idle + paused
    found = {
        "trainer_wait": waited / (waited + worked) if waited + worked else math.nan,
        "rollout_idle": idle / spent if spent else math.nan,
        "rollout_paused": paused / spent if spent else math.nan,
    }
    if "emulated_prefill_s" in rollout:  # real engines do not report it separately
        found["rollout_prefill"] = rollout["emulated_prefill_s"] / spent if spent else math.nan
    return found


def _emulated(config: RunConfig, data: RunData, counted: Sequence[Row], wall_s: float, tokens: int) -> Row:
    """Bound and lateness."""
    emulation = config.emulation
    assert emulation is not None
    trainer_s = sum(step["emulated_step_s"] for step in counted)
    rollout_s = tokens / full_rate(config)
    num_steps = len(counted)
    return {
        "trainer_alone_s": trainer_s * emulation.speedup / num_steps,
        "rollout_alone_s": rollout_s * emulation.speedup / num_steps,
        "bound_share": max(trainer_s, rollout_s) / wall_s,
        "speedup": emulation.speedup,
        "late_share": late_share(last_counters(data), len(data.steps), data.steps[-1]["wall_s"]),
    }


def full_rate(config: RunConfig) -> float:
    """Tokens on the wire per real second of all rollout workers with full batches and without waits."""
    emulation = config.emulation
    assert emulation is not None
    costs = roofline_of(emulation, slots=config.rollout.engine.num_slots)
    lengths = lengths_of(emulation, config.sampling.max_new_tokens)
    mean, squares = moments(lengths)
    slots = slots_of(emulation, costs, lengths)
    context = emulation.prompt_tokens + squares / (2 * mean)
    """Mean context of a token that is being decoded."""
    per_sequence_s = costs.decode_s(slots, slots * context) + slots / mean * costs.prefill_s(emulation.prompt_tokens)
    rate = slots / per_sequence_s
    return rate * config.rollout.num_workers * emulation.speedup / emulation.token_scale


def moments(lengths: Any) -> tuple[float, float]:
    """Mean and mean square of emulated answers."""
    import numpy as np

    rng = np.random.default_rng(0)
    drawn = np.asarray([lengths.draw(rng, 8) for _ in range(4000)], dtype=np.float64)
    return float(drawn.mean()), float(np.square(drawn).mean())


def last_counters(data: RunData) -> dict[str, Mapping[str, float]]:
    """Newest counters of each process, by name."""
    found: dict[str, Mapping[str, float]] = {}
    for pulse in data.pulses:
        for name, process in pulse["processes"].items():
            if process["counters"]:
                found[name] = process["counters"]
    return found


def late_share(counters: Mapping[str, Mapping[str, float]], num_steps: int, wall_s: float) -> float:
    """The share by which the machine's lateness may have extended a run of `num_steps` steps."""
    trainer_s = counters.get("trainer", {}).get("emulation_late_s", 0.0)
    engines = [found for name, found in counters.items() if name.startswith("rollout")]
    wakes = sum(found.get("emulation_wakes", 0.0) for found in engines)
    mean_s = sum(found.get("emulation_late_s", 0.0) for found in engines) / wakes if wakes else 0.0
    return (trainer_s + 2 * mean_s * num_steps) / wall_s if wall_s > 0 else math.inf


def curve_of(folder: Path) -> list[tuple[int, float, float]]:
    """(version, seconds of training until it was made, its accuracy) of each evaluation after the start."""
    data = RunData.load(RunFolder(folder), max_samples=1)
    by_step = {step["step"]: float(step["wall_s"]) for step in data.steps}
    rows = [row for row in data.evals if row.get("accuracy") is not None and row["version"] in by_step]
    return sorted((row["version"], by_step[row["version"]], float(row["accuracy"])) for row in rows)


def crossing(curve: Sequence[tuple[int, float, float]], accuracy: float) -> float | None:
    """Seconds until a curve first reached this accuracy, interpolated linearly between evaluations; None: never.

    Without interpolation, a side with fewer evaluations would be at a disadvantage. If the first evaluation already
    reaches it, the time of that evaluation is returned.
    """
    for place, (_, seconds, reached) in enumerate(curve):
        if reached >= accuracy:
            if place == 0:
                return seconds
            _, before_s, before = curve[place - 1]
            return before_s + (accuracy - before) / (reached - before) * (seconds - before_s)
    return None


def time_to(folder: Path, accuracy: float) -> float | None:
    """Seconds of training until the policy was this accurate, by `crossing`; None: never."""
    return crossing(curve_of(folder), accuracy)


def rate_until(folder: Path, reached_s: float | None) -> float:
    """Samples per second from the start of the first generation until a time of training; None: until the end."""
    steps = _settled(folder).steps
    counted = [step for step in steps if reached_s is None or step["wall_s"] <= reached_s]
    return sum(step["num_samples"] for step in counted) / float(counted[-1]["wall_s"])
