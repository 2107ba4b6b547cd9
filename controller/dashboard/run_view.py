"""The content of the page of one run: read by offset, drawn with the report's charts.

Reads new data and assembles the parts of the page. Charts are in report/, the texts of events and waits in
report/overview.py, updates in changes.py.

When a step is repeated (after a resume), it invalidates the later ones; the file is then read again from its beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from areal_like.errors import UserError
from controller.dashboard.cards import cards, header, process_rows
from controller.dashboard.changes import changes
from controller.dashboard.condensed import Condensed, ThinnedPulses
from controller.dashboard.jsonl_tail import JsonlTail
from controller.dashboard.live_charts import PulseCharts, sections
from controller.dashboard.log_tail import LogTail
from controller.report import overview, page
from controller.report.answers import held_out_answers
from controller.report.charts import number
from controller.report.data import RunData, checked_pulse, read_settings, with_values
from controller.report.paired import as_arrays
from controller.report.timeline import PulseTimeline, Timeline
from controller.run_folder.run_folder import RunFolder
from controller.runs.facts import Facts, read_facts

MAX_EVENTS = 200
RECENT_PULSES = 60
MAX_TIMELINE_BINS = 300
EVENT_KINDS = ("note", "process", "sink", "dropped")


class RunView:
    """A view for a feed."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics = JsonlTail(folder.metrics)
        self._logs = LogTail(folder)
        self._settings: dict[str, Any] = {}
        self._settings_of = -1
        self._content: dict[str, Any] = {}
        self._clear()

    def refresh(self) -> Mapping[str, Any]:
        """Return the parts that changed. Raises OSError if metrics.jsonl cannot be read."""
        has_rows = self._read_rows()
        problems = [f"{self._metrics.num_damaged} lines of metrics.jsonl are damaged and ignored"] * bool(
            self._metrics.num_damaged
        )
        self._read_settings(problems)
        facts = self._facts(problems)
        problems += self._missing()
        data = self._data(facts)
        fresh = self._logs.news()
        new = {
            **self._content,
            "run": header(self._folder, facts),
            "cards": cards(data, facts),
            "waits_now": [overview.text(wait) for wait in (facts.status.get("waits") or [] if facts else [])],
            "processes": process_rows(facts),
            "problems": [overview.text(problem) for problem in problems],
        }
        if has_rows or not self._content:
            new |= self._drawn(data)
        found = changes(self._content, new)
        self._content = new
        return {**found, "log": fresh} if fresh else found

    def snapshot(self) -> Mapping[str, Any]:
        """Everything."""
        return {**self._content, "log": self._logs.recent()}

    # -------------------------------------------------------- reading

    def _clear(self) -> None:
        self._steps, self._pulses, self._timeline = Condensed(), ThinnedPulses(), PulseTimeline()
        self._rewards: list[dict[str, Any]] = []
        self._evals: dict[int, dict[str, Any]] = {}
        self._slices: dict[int, dict[str, Any]] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_PULSES)
        self._events: dict[str, deque[dict[str, Any]]] = {kind: deque(maxlen=MAX_EVENTS) for kind in EVENT_KINDS}
        self._origin_s: float | None = None
        self._has_new_pulses = False
        self._over_time: tuple[PulseCharts, Timeline] | None = None

    def _read_rows(self) -> bool:
        rows, began_again = self._metrics.read()
        if began_again:
            self._clear()
        if self._rewards and any(_step_of(row) <= self._rewards[-1]["step"] for row in rows if row["kind"] == "step"):
            self._metrics = JsonlTail(self._folder.metrics)
            rows, _ = self._metrics.read()
            self._clear()
        for row in surviving(rows):
            self._take(row)
        return bool(rows) or began_again

    def _take(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        time_s = number(row.get("time_s"))
        if self._origin_s is None:
            self._origin_s = time_s
        if kind == "step":
            self._steps.add(row)
            self._rewards.append({"step": row["step"], "reward_mean": row.get("reward_mean")})
        elif kind == "eval" and isinstance(row.get("version"), int):
            self._evals[row["version"]] = row
        elif kind == "eval_values" and isinstance(row.get("version"), int):
            self._values[row["version"]] = as_arrays(row)  # compared at each refresh
        elif kind == "slices" and isinstance(row.get("version"), int):
            self._slices[row["version"]] = row
        elif kind == "pulse":
            pulse = checked_pulse(row)
            self._pulses.add(pulse)
            self._recent.append(pulse)
            self._timeline.add(pulse)
            self._has_new_pulses = True
        elif kind in self._events:
            self._events[kind].append(row)

    def _read_settings(self, problems: list[str]) -> None:
        try:
            changed_ns = self._folder.config.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if changed_ns != self._settings_of:
            self._settings, self._settings_of = read_settings(self._folder, []), changed_ns
        if not self._settings:
            problems.append("config.yaml is missing or damaged")

    def _facts(self, problems: list[str]) -> Facts | None:
        try:
            facts = read_facts(self._folder, whole=False)
        except UserError as error:
            problems.append(error.what)
            return None
        problems += facts.problems
        return facts

    def _missing(self) -> list[str]:
        return [] if self._folder.metrics.is_file() else ["metrics.jsonl is missing: no steps and no events are known"]

    def _data(self, facts: Facts | None) -> RunData:
        return RunData(
            folder=self._folder,
            state=dict(facts.where.state) if facts else {},
            config=self._settings,
            summary=facts.summary if facts else None,
            status=facts.status if facts else None,
            steps=list(self._steps.rows),
            evals=with_values([self._evals[version] for version in sorted(self._evals)], self._values.values()),
            slices=[self._slices[version] for version in sorted(self._slices)],
            pulses=self._pulses.rows,
            notes=list(self._events["note"]),
            dropped=list(self._events["dropped"]),
            processes=list(self._events["process"]),
            sinks=list(self._events["sink"]),
            where=facts.where if facts else None,
        )

    # -------------------------------------------------------- drawing

    def _drawn(self, data: RunData) -> dict[str, Any]:
        """The parts that depend only on rows."""
        if self._over_time is None or self._has_new_pulses:
            self._over_time = PulseCharts.of(data), self._timeline.timeline(max_bins=MAX_TIMELINE_BINS)
            self._has_new_pulses = False
        pulses, timeline = self._over_time
        found = sections(data, replace(data, steps=self._rewards), self._steps.per_bin, pulses)
        drawn = page.payload([chart for section in found for chart in section.charts], timeline)
        recent = replace(data, pulses=list(self._recent))
        events, _ = overview.events(replace(data, steps=[{"time_s": self._origin_s}], pulses=[]))
        return {
            "sections": [
                {"key": section.key, "title": section.title,
                 "charts": [{"key": one.key, "title": one.title, "caption": one.caption} for one in section.charts]}
                for section in found
            ],
            "charts": drawn["charts"],
            "timeline": {**drawn["timeline"], "words": timeline_words(timeline)},
            "waits": [{"words": wait.words, "share": round(wait.share, 3)} for wait in overview.waits(recent)],
            "held_out": msgspec.to_builtins(held_out_answers(data.evals)),
            "events": [msgspec.to_builtins(event) for event in reversed(events[-MAX_EVENTS:])],
        }  # fmt: skip


def timeline_words(timeline: Timeline) -> str:
    """Caption of the timeline, with processes that are not drawn."""
    if not timeline.strips:
        return timeline.missing
    words = (
        f"One strip per process, from its counters in bins of {timeline.bin_s:.3g} s; hatched: the process waits. "
        "The report draws it from traces, in finer bins."
    )
    for role, count in timeline.left_out.items():
        words += f" {count} more {role} processes are not drawn."
    return words


def surviving(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without steps that a later row invalidates. Step numbers are converted to int; other rows are
    unchanged.
    """
    lowest: int | None = None
    kept = []
    for row in reversed(rows):
        if row["kind"] == "step":
            step = _step_of(row)
            if step < 0 or (lowest is not None and step >= lowest):
                continue
            lowest = step
            row = {**row, "step": step}
        kept.append(row)
    kept.reverse()
    return kept


def _step_of(row: Mapping[str, Any]) -> int:
    """Step of a row; -1 if it is missing in a damaged row."""
    value = number(row.get("step"))
    return int(value) if value is not None and value >= 0 and value == int(value) else -1
