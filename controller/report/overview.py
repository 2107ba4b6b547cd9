"""Texts and single numbers of a report: key figures, waits, events, environment.

Charts are in run_charts.py. All texts of a run are returned as plain text with control characters escaped; the page
escapes them again for HTML.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_like.external.records import FOLDER as EXTERNAL
from areal_like.external.records import totals_of
from controller.report.charts import Number, column, elapsed_s, number
from controller.report.data import RunData
from controller.report.finding import percent
from controller.report.shares import Shares, measure
from controller.run_folder.formatting import printable, span

MAX_EVENTS = 200
MAX_WAITS = 6
MAX_TEXT_CHARS = 600
MAX_LEVELS = 11
"""Maximum levels of difficulty that are listed: success rates rounded to a tenth."""


@dataclass(frozen=True)
class Figure:
    """One key number, formatted. `note` gives a value for comparison."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Event:
    """An event. `at` is a time since the first row, `level` one of info, warning, bad."""

    at: str
    kind: str
    text: str
    level: str = "info"


@dataclass(frozen=True)
class Wait:
    """A wait, and the share of the pulses that report it."""

    words: str
    share: float


def text(value: Any, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Convert any value of a run to safe text of bounded length."""
    words = printable(str(value))
    return words if len(words) <= max_chars else words[: max_chars - 1] + "…"


# ------------------------------------------------------------ key numbers


def figures(data: RunData) -> list[Figure]:
    """The key numbers; for a run in progress the ones available in its rows."""
    found, shares = data.summary or {}, measure(data)
    return [figure for figure in (
        _steps(data), _accuracy(data), _reward(data), _rate(data, found, "samples_per_s", "samples/s", "samples used"),
        _rate(data, found, "tokens_per_s", "tokens/s", "sampled tokens used"),
        _share(shares, shares.trainer_wait, "trainer waited"), _share(shares, shares.rollout_idle, "rollout idle"),
        _share(shares, shares.rollout_paused, "rollout paused for weights"),
        _staleness(data), _lengths(data), _time(data, found), _cleaned(data), _groups(found),
        _removed(data, "passed over", "draws", "success rate"), _removed(data, "filtered", "groups", "reward"),
        _audit(found), *_external(data),
    ) if figure is not None]  # fmt: skip


def _steps(data: RunData) -> Figure:
    planned = number(data.setting("num_steps"))
    last = data.steps[-1]["step"] if data.steps else 0
    return Figure("steps", f"{last:,}", f"of {planned:,.0f}" if planned is not None else "")


def _accuracy(data: RunData) -> Figure | None:
    known = [(row["version"], number(row.get("accuracy"))) for row in data.evals]
    points = [(version, accuracy) for version, accuracy in known if accuracy is not None]
    if not points:
        return None
    first, last = points[0], points[-1]
    if first == last:
        return Figure("accuracy", f"{last[1]:.3f}", f"version {last[0]}, the only evaluation")
    return Figure("accuracy", f"{first[1]:.3f} → {last[1]:.3f}", f"version {first[0]} → {last[0]}, held-out prompts")


def _reward(data: RunData) -> Figure | None:
    rewards = [value for value in column(data.steps, "reward_mean") if value is not None]
    if not rewards:
        return None
    window = max(1, min(10, len(rewards) // 4))
    first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    steps = "step" if window == 1 else f"{window} steps"
    return Figure("reward", f"{first:.3f} → {last:.3f}", f"mean of the first and last {steps}")


def _rate(data: RunData, found: Mapping[str, Any], key: str, unit: str, note: str) -> Figure | None:
    value = number(found.get(key))
    if value is None and data.steps:
        wall_s = next((one for one in reversed(elapsed_s(column(data.steps, "wall_s"))) if one is not None), None)
        field = {"samples_per_s": "num_samples", "tokens_per_s": "num_sampled_tokens"}[key]
        total = sum(one for one in column(data.steps, field) if one is not None)
        value = total / wall_s if wall_s and total else None
    note += _since(found)
    return None if value is None else Figure(unit, f"{value:,.0f}" if value >= 10 else f"{value:.2g}", note)


def _since(found: Mapping[str, Any]) -> str:
    """Label for a number of the summary that counts from the last resume, if there was one."""
    lives = number(found.get("lives")) or 1
    return " since the last resume" if lives > 1 else ""


def _share(shares: Shares, value: float, label: str) -> Figure | None:
    """The same number as in the findings."""
    if not math.isfinite(value):
        return None
    return Figure(label, percent(value), f"of its time, {'without start and end' if shares.is_steady else 'whole run'}")


def _staleness(data: RunData) -> Figure | None:
    means = [value for value in column(data.steps, "staleness_mean") if value is not None]
    highs = [value for value in column(data.steps, "staleness_max") if value is not None]
    if not means or not highs:
        return None
    bound = data.setting("staleness.max_staleness")
    note = f"mean, max {max(highs):.0f}" + (f", bound {text(bound, 20)}" if bound is not None else "")
    return Figure("staleness", f"{sum(means) / len(means):.2f}", note)


def _lengths(data: RunData) -> Figure | None:
    """Lengths of all samples until the newest step."""
    row = data.steps[-1] if data.steps else {}
    known = [number(row.get(f"{name}_len_{key}")) for key in ("mean", "p50", "p99") for name in ("trained", "drawn")]
    if any(value is None for value in known):
        return None
    mean, drawn_mean, p50, drawn_p50, p99, drawn_p99 = (value or 0.0 for value in known)
    note = (
        f"trained, {drawn_mean:,.4g} drawn; median {p50:,.0f} and {drawn_p50:,.0f}, "
        f"99th percentile {p99:,.0f} and {drawn_p99:,.0f}"
    )
    return Figure("tokens per answer", f"{mean:,.4g}", note)


def _time(data: RunData, found: Mapping[str, Any]) -> Figure | None:
    seconds = number(found.get("wall_s"))
    if seconds is not None:
        prepared_s = number(found.get("prepare_s")) or 0.0
        note = f"{span(prepared_s)} of it preparing" if prepared_s >= 1 else ""
        return Figure("wall time", span(seconds), f"{note}{_since(found)}".strip())
    wall_s = number(data.steps[-1].get("wall_s")) if data.steps else None
    return None if wall_s is None else Figure("wall time", span(wall_s), "from the first lease to the last step")


def _groups(found: Mapping[str, Any]) -> Figure | None:
    drawn, consumed = number(found.get("groups_drawn")), number(found.get("groups_consumed"))
    if drawn is None or consumed is None:
        return None
    others = [
        f"{number(found.get(f'groups_{fate}')) or 0:,.0f} {fate.replace('_', ' ')}"
        for fate in ("filtered", "dropped", "in_flight")
        if number(found.get(f"groups_{fate}"))
    ]
    whole = ", all since the start" if _since(found) else ""
    return Figure(
        "groups used", f"{consumed:,.0f}", f"of {drawn:,.0f} drawn" + "".join(f", {one}" for one in others) + whole
    )


def _removed(data: RunData, name: str, unit: str, level: str) -> Figure | None:
    """Rows that a filter left out, by difficulty and length."""
    rows = data.samples.removed.get(name, []) if data.samples is not None else []
    if not rows:
        return None
    parts = [f"{one.num_draws:,} at {level} {one.level:g} ({one.mean_tokens:,.0f} tokens)" for one in rows[:MAX_LEVELS]]
    more = ", …" if len(rows) > MAX_LEVELS else ""
    return Figure(f"{unit} {name}", f"{sum(one.num_draws for one in rows):,}", ", ".join(parts) + more)


def _cleaned(data: RunData) -> Figure | None:
    """What `data.train.stages` removed, as state.json has it."""
    counts = data.state.get("cleaning")
    if not isinstance(counts, dict):
        return None
    rows_in, rows_out = number(counts.get("rows_in")), number(counts.get("rows_out"))
    stages = counts.get("stages")
    if rows_in is None or rows_out is None or not isinstance(stages, list):
        return None
    removed = ", ".join(text(f"{one.get('kind')} {one.get('removed')}", 80) for one in stages if isinstance(one, dict))
    return Figure("rows kept", f"{rows_out:,.0f}", f"of {rows_in:,.0f}; removed by {removed}")


def _audit(found: Mapping[str, Any]) -> Figure | None:
    audit = found.get("audit")
    return None if audit is None else Figure("audit", text(audit, 80), "invariants recounted from the ledger")


def _external(data: RunData) -> list[Figure]:
    """Requests to external models, from the files of their answers."""
    found = []
    for name, sums in totals_of(data.folder.root / EXTERNAL).items():
        cost = f", cost {sums.cost:.4g}" if sums.cost else ""
        note = f"answers of an external model; {sums.tokens:,} tokens{cost}"
        found.append(Figure(text(name, 40), f"{sums.requests:,}", note))
    return found


# ------------------------------------------------------------ waits and events


def waits(data: RunData) -> list[Wait]:
    """Waits from the sentences of the pulses, without numbers, most frequent first."""
    found: Counter[str] = Counter()
    for pulse in data.pulses:
        found.update({_pattern(sentence) for sentence in pulse["waits"]})
    return [Wait(words, count / len(data.pulses)) for words, count in found.most_common(MAX_WAITS)]


def _pattern(sentence: str) -> str:
    head = re.split(r"[;:,(]", sentence, maxsplit=1)[0]
    return text(re.sub(r"(?<![\w-])\d+(?:\.\d+)?", "n", head).strip(), 160)


def events(data: RunData) -> tuple[list[Event], int]:
    """Notes, lost processes, sinks, and drops by reason, in order; and the number of events left out in the middle."""
    timed = [*data.steps, *data.evals, *data.notes, *data.pulses, *data.processes, *data.sinks]
    origin_s = min(_times(timed), default=0.0)
    rows: list[tuple[float, Event]] = []

    def put(row: Mapping[str, Any], kind: str, words: str, level: str = "info") -> None:
        time_s = number(row.get("time_s"))
        at = "" if time_s is None else _clock(time_s - origin_s)
        rows.append((time_s if time_s is not None else origin_s, Event(at, kind, text(words), level)))

    for row in data.notes:
        kind, words = text(row.get("note", "note"), 60), str(row.get("text", ""))
        if "the run is over" in words:  # all workers exit then, which is not an incident
            continue
        put(row, kind.replace("_", " "), words, "info" if kind == "advice" else "warning")
    for row in data.processes:
        words = f"{row.get('name')} is {row.get('event')}" + (f": {row['reason']}" if row.get("reason") else "")
        put(row, "process", words, "bad" if row.get("event") == "lost" else "info")
    for row in data.sinks:
        put(row, "metrics sink", _sink(row), "warning" if row.get("event") == "down" else "info")
    rows.sort(key=lambda pair: pair[0])
    ordered = [event for _, event in rows]
    left_out = max(0, len(ordered) - MAX_EVENTS)
    if left_out:
        half = MAX_EVENTS // 2
        ordered = [*ordered[:half], *ordered[-half:]]
    return [*_drops(data), *ordered], left_out


def _sink(row: Mapping[str, Any]) -> str:
    words = f"{row.get('sink')} is {row.get('event')}" + (f": {row['error']}" if row.get("error") else "")
    counts = [f"{row[key]} {key}" for key in ("written", "lost") if number(row.get(key)) is not None]
    return words + (f" ({', '.join(counts)})" if counts else "")


def _drops(data: RunData) -> Iterable[Event]:
    """One event per reason, because a run may drop thousands of groups."""
    reasons = Counter(str(row.get("reason") or "unknown") for row in data.dropped)
    for reason, count in reasons.most_common():
        example = next(row for row in data.dropped if str(row.get("reason") or "unknown") == reason)
        detail = f"; the first: group {example.get('group_id')}" + (
            f", {example['detail']}" if example.get("detail") else ""
        )
        yield Event("", "dropped", text(f"{count:,} groups dropped, {reason.replace('_', ' ')}{detail}"), "warning")


def _times(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    return [value for value in column(rows, "time_s") if value is not None]


def _clock(seconds: float) -> str:
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


# ------------------------------------------------------------ environment


def environment(data: RunData) -> list[tuple[str, str]]:
    """Machine, versions and origin from the run folder, as (name, value)."""
    known = [("run folder", text(data.folder.root)), *_state_rows(data.state)]
    for file in ("environment.json", "trainer.json"):
        try:
            found = json.loads((data.folder.root / file).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        known += [(name, value) for name, value in _flat(found) if (name, value) not in known]
    return [*known, ("this report was made with", _here())]


def _here() -> str:
    """The machine that makes the report: at the end of a run the controller's."""
    return (
        f"Python {platform.python_version()} on {socket.gethostname()}, {platform.platform()}, {os.cpu_count()} cores"
    )


_STATE_NAMES: Mapping[str, str] = {
    "run_id": "run id", "host": "host", "command": "command", "started_in": "started in", "source": "configuration",
    "created_s": "created", "ended_s": "ended", "reason": "ended because",
}  # fmt: skip


def _state_rows(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, name in _STATE_NAMES.items():
        value = state.get(key)
        seconds = number(value)
        if key.endswith("_s") and seconds is not None:
            rows.append((name, _date(seconds)))
        elif value not in (None, "") and isinstance(value, str | int):
            rows.append((name, text(value)))
    for key in ("python", "platform", "machine", "versions", "environment", "areal_like"):
        if key in state:
            rows += _flat({key: state[key]})
    return rows


def _flat(found: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(found, Mapping):
        return [(prefix, text(found))] if prefix else []
    return [row for key, value in found.items() for row in _flat(value, f"{prefix} {key}".strip().replace("_", " "))]


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "-"


def dated(seconds: Number) -> str:
    """A wall-clock time as a date, empty if there is none."""
    return "" if seconds is None else _date(seconds)


def process_shares(seconds: Mapping[str, float], span_s: float) -> Sequence[tuple[str, float]]:
    """Activities of a process by share of its recorded time, above 0.05 %."""
    if span_s <= 0:
        return []
    return [(name, part_s / span_s) for name, part_s in seconds.items() if part_s / span_s >= 0.0005]
