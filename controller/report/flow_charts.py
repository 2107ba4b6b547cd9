"""Charts of throughput and processes: staleness, throughput, waits, weight swaps, memory, cores, the reward queue.

Other charts of a run are in run_charts.py, activity strips in timeline.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from controller.report.charts import (
    NO_STEPS,
    STEP,
    Axis,
    Chart,
    Number,
    Rows,
    Series,
    clock,
    column,
    curve,
    number,
    of_steps,
    points_per_bin,
    tidy,
)
from controller.report.colours import DASHES, NUM_RAMP
from controller.report.cores import available, between
from controller.report.data import RunData

MAX_STALENESS_BARS = 120
MAX_LINES = 8
"""Maximum curves of one chart; with more processes only the largest are drawn."""


def _no_pulses(data: RunData) -> str:
    return "the pulses do not contain these metrics" if data.pulses else "the run wrote no pulses"


# ------------------------------------------------------------ staleness


def staleness_classes(highest: int) -> list[tuple[int, int]]:
    """At most NUM_RAMP ranges of staleness, single values while they fit, then powers of two."""
    if highest < NUM_RAMP:
        return [(value, value) for value in range(highest + 1)]
    ranges = [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)]
    return [*[pair for pair in ranges if pair[0] <= highest], *([(33, highest)] if highest > 32 else [])]


def class_names(classes: Sequence[tuple[int, int]]) -> list[str]:
    """`0`, `1`, `3 to 4`."""
    return [str(low) if low == high else f"{low} to {high}" for low, high in classes]


def staleness_of(row: Mapping[str, Any]) -> list[int]:
    """Staleness of each group of a step."""
    values = row.get("staleness")
    return [int(v) for v in values if number(v) is not None and v >= 0] if isinstance(values, list) else []


def staleness_over_time(steps: Rows) -> Chart:
    """Share of the groups of each step by staleness, stacked."""
    known = [(number(row.get("step")), staleness_of(row)) for row in steps]
    rows = [(step, values) for step, values in known if step is not None and values]
    per_bar = points_per_bin(len(rows), MAX_STALENESS_BARS)
    classes = staleness_classes(max((max(values) for _, values in rows), default=0))
    xs: list[float] = []  # centres of full bars, also for a last bar with fewer steps, so that all are equally wide
    shares: list[list[Number]] = [[] for _ in classes]
    for start in range(0, len(rows), per_bar):
        bar = rows[start : start + per_bar]
        merged = [value for _, values in bar for value in values]
        xs.append(tidy(bar[0][0] + (per_bar - 1) / 2))
        for place, (low, high) in enumerate(classes):
            shares[place].append(tidy(sum(low <= value <= high for value in merged) / len(merged)))
    ramp = _ramp(len(classes))
    series = [
        Series(name, xs, shares[place], "stacked", ramp[place])
        for place, name in enumerate(class_names(classes) if rows else [])
    ]
    caption = (
        "Staleness of the groups of each step (number of versions behind the trained policy), as fractions of the "
        "groups of the step."
    )
    caption += f" Each bar stands for {per_bar} steps." if per_bar > 1 else ""
    y = Axis("share of groups", is_share=True, bottom=0.0, top=1.0)
    return Chart("chart-staleness-time", "Staleness over time", STEP, y, series, caption, NO_STEPS)


def _ramp(count: int) -> list[str]:
    """`count` colours of the ramp; with few classes every second one, for a larger contrast."""
    stride = 2 if 2 * count <= NUM_RAMP else 1
    return [f"r{place * stride}" for place in range(count)]


def staleness_histogram(data: RunData) -> Chart:
    """Groups of the whole run by staleness."""
    found: Counter[int] = Counter(value for row in data.steps for value in staleness_of(row))
    classes = staleness_classes(max(found)) if found else []
    counts = [float(sum(count for value, count in found.items() if low <= value <= high)) for low, high in classes]
    bars = [Series("groups", class_names(classes), counts, "bars", "c0")] if found else []
    bound = data.setting("staleness.max_staleness")
    caption = "Groups consumed, by staleness." + (f" The bound of this run: {bound}." if bound is not None else "")
    x = Axis("staleness", "versions")
    return Chart(
        "chart-staleness", "Staleness of the whole run", x, Axis("groups", bottom=0.0), bars, caption, NO_STEPS
    )


# ------------------------------------------------------------ speed


def throughput(steps: Rows) -> Chart:
    """Tokens per second sampled and used."""
    lines = [("rollout_tokens_per_s", "sampled by rollout workers", "c0"),
             ("trainer_tokens_per_s", "used by the trainer", "c2")]  # fmt: skip
    caption = "Tokens sampled and tokens trained on, per second of wall time between two steps."
    return of_steps(steps, "chart-throughput", "Tokens per second", Axis("tokens/s", bottom=0.0), lines, caption)


def samples_rate(steps: Rows) -> Chart:
    """Samples consumed per second."""
    lines = [("samples_per_s", "samples consumed", "c0")]
    caption = "Samples of a step, divided by the time since the previous step."
    y = Axis("samples/s", bottom=0.0)
    return of_steps(steps, "chart-samples", "Samples per second", y, lines, caption)


def waiting(steps: Rows) -> Chart:
    """Share of the trainer's time spent waiting for a batch."""
    lines = [("trainer_wait_share", "trainer waited for its batch", "c1")]
    caption = "Fraction of the time since the previous step in which the trainer waited for a batch."
    y = Axis("share of time", is_share=True, bottom=0.0, top=1.0)
    return of_steps(steps, "chart-waiting", "Trainer waiting", y, lines, caption)


def step_time(steps: Rows) -> Chart:
    """Seconds of computing and of publishing per step."""
    lines = [("step_s", "forward, backward, update", "c2"), ("publish_s", "publish the weights", "c3")]
    caption = "Time of one trainer step, without the wait for its batch."
    return of_steps(steps, "chart-step-time", "Time of a step", Axis("time", "s", bottom=0.0), lines, caption)


def swaps(data: RunData) -> Chart:
    """Time that rollout workers took to fetch, and to swap in, each version."""
    rows = sorted(
        (row for row in data.swaps if number(row.get("version")) is not None), key=lambda row: float(row["version"])
    )
    xs = column(rows, "version")
    series = []
    for field, name, colour, dash in (("stage_s", "fetched in the background", "c0", "solid"),
                                      ("pause_s", "generation paused", "c1", "dash")):  # fmt: skip
        ys = [None if value is None else value * 1000 for value in column(rows, field)]
        worst: dict[Number, Number] = {}
        for version, value in zip(xs, ys, strict=True):
            if value is not None:
                worst[version] = max(value, worst.get(version) or 0.0)
        series.append(curve(name, list(worst), list(worst.values()), colour=colour, dash=dash, by=np.max))
    caption = "The slowest rollout worker at each version. Only the second part pauses generation."
    y = Axis("time", "ms", bottom=0.0)
    return Chart("chart-swaps", "Weight swaps", Axis("version"), y, series, caption, "no version was swapped in")


def in_flight(data: RunData) -> Chart:
    """Groups running and groups waiting for the trainer, over time."""
    x, xs = clock(_pulse_times(data))
    counts = [pulse["counts"] for pulse in data.pulses]
    series = [
        curve("being generated or scored", xs, column(counts, "running"), colour="c0"),
        curve("ready, waiting for the trainer", xs, column(counts, "ready"), colour="c2", dash="dash"),
    ]
    caption = "If many groups are ready, the trainer is the bottleneck. If none are ready, the rollout workers are."
    y = Axis("groups", bottom=0.0)
    return Chart("chart-flight", "Groups in progress", x, y, series, caption, _no_pulses(data))


# ------------------------------------------------------------ processes


def _pulse_times(data: RunData) -> list[Number]:
    """Seconds since the first pulse, including startup, without the time between sessions."""
    times: list[Number] = []
    total, before = 0.0, None
    for pulse in data.pulses:
        time_s, wall_s = number(pulse.get("time_s")), number(pulse.get("wall_s")) or 0.0
        if time_s is None:
            times.append(None)
            continue
        if before is not None and wall_s >= before[1]:
            total += max(0.0, time_s - before[0])
        times.append(total)
        before = (time_s, wall_s)
    return times


def memory(data: RunData) -> Chart:
    """Resident memory of each process over time."""
    x, xs = clock(_pulse_times(data))
    known = [pulse["processes"] for pulse in data.pulses]
    names = dict.fromkeys(name for one in known for name in one)
    found = {name: [number(one.get(name, {}).get("rss_mb")) for one in known] for name in names}
    series, scale = _largest(xs, found)
    caption = f"Resident memory.{scale}"
    return Chart("chart-memory", "Memory", x, Axis("memory", "MB", bottom=0.0), series, caption, _no_pulses(data))


def processor_time(data: RunData) -> Chart:
    """Cores used by each process over time."""
    x, xs = clock(_pulse_times(data))
    found: dict[str, list[Number]] = {}
    for place, elapsed_s, grown in between(data.pulses):
        for name, seconds in grown.items():
            found.setdefault(name, [None] * len(xs))[place] = seconds / elapsed_s
    series, scale = _largest(xs, found)
    cores = available(data)
    caption = "Mean since the previous pulse, including child processes." + scale
    if math.isfinite(cores):
        caption += f" The run may use {cores:g} cores of this machine."
    y = Axis("cores at work", bottom=0.0)
    return Chart("chart-cores", "Processor time", x, y, series, caption, _no_pulses(data))


def _largest(xs: Sequence[Number], found: Mapping[str, Sequence[Number]]) -> tuple[list[Series], str]:
    """A curve for each of the processes with the highest peaks, and a sentence about the others."""
    ranked = sorted(found, key=lambda name: -max((y for y in found[name] if y is not None), default=0.0))[:MAX_LINES]
    series = [
        curve(name, xs, list(found[name]), colour=f"c{place}", dash=DASHES[place], by=np.max)
        for place, name in enumerate(sorted(ranked))
    ]
    left_out = len(found) - len(ranked)
    return series, f" The {len(ranked)} largest are shown; {left_out} more are omitted." if left_out else ""


def reward_queue(data: RunData) -> Chart:
    """Answers waiting for a score, and busy scorers."""
    x, xs = clock(_pulse_times(data))
    counters = []
    for pulse in data.pulses:
        rewards = [process for process in pulse["processes"].values() if process.get("role") == "reward"]
        sums: Counter[str] = Counter()
        for process in rewards:
            for key in ("queue", "busy_workers", "running"):
                value = number(process["counters"].get(key))
                if value is not None:
                    sums[key] += value  # type: ignore[assignment]
        counters.append(dict(sums))
    busy = "busy_workers" if any("busy_workers" in row for row in counters) else "running"
    series = [
        curve("answers waiting", xs, column(counters, "queue"), colour="c1", by=np.max),
        curve("scorer processes busy", xs, column(counters, busy), colour="c0", dash="dash"),
    ]
    caption = "If the queue grows while all scorers are busy, the reward service is the bottleneck."
    return Chart("chart-queue", "Reward service", x, Axis("count", bottom=0.0), series, caption, _no_pulses(data))
