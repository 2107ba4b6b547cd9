"""Activity strips: what each process did over time, in bounded size for runs of any length.

Reads the `main` lanes of logs/*.trace.jsonl line by line, or pulses for processes without a trace, and puts all
processes on one axis of at most a few thousand bins. Drawing is in page.py and picture.py.

A bin contains the share of its time for each activity; time without a slice stays empty. The time between the sessions
of a resumed run is cut out and marked.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from areal_like.trace import MAIN_LANE
from controller.report.activity_grid import ActivityGrid, NestedLane, widest
from controller.report.charts import number, tidy
from controller.report.data import RunData

MAX_BINS = 2000
MAX_TOTAL_BINS = 24_000
"""Bins of all strips together: many processes get fewer bins each, so that the page stays small."""
MAX_PER_ROLE = 12
"""Strips of one role; a run of 500 rollout workers shows the first twelve."""
MIN_BREAK_S = 10.0
SIDE_LANES = ("packing",)
"""Lanes other than `main` that get a separate strip: work concurrent to the process's main work."""
ROLES = ("rollout", "reward", "trainer", "controller")
_COUNTER_ACTIVITIES: Mapping[str, Mapping[str, str]] = {
    "rollout": {
        "busy_s": "generate", "paused_s": "paused", "wait_score_s": "wait:score", "wait_version_s": "wait:version",
        "wait_teacher_s": "wait:teacher", "wait_work_s": "wait:work", "load_s": "load", "workflow_s": "workflow",
        "wait_traffic_s": "wait:traffic",
    },
    "trainer": {"busy_s": "train", "wait_s": "wait:batch"},
}  # fmt: skip


@dataclass(frozen=True)
class Strip:
    """One process (or an additional lane of it). The shares apply from `xs_s[i]` to `xs_s[i + 1]`."""

    name: str
    role: str
    source: Literal["trace", "pulses"]
    xs_s: Sequence[float]
    shares: Mapping[str, Sequence[float]]
    """By activity, one share (0 to 1) per x; the last one ends the strip."""
    seconds: Mapping[str, float]
    """Sum over the run, by activity, longest first."""
    span_s: float
    """From its first to its last record, without the time between sessions."""


@dataclass(frozen=True)
class Break:
    """A point at which the run was stopped and resumed."""

    at_s: float
    rest_s: float


@dataclass(frozen=True)
class Timeline:
    """All strips over one axis that starts at the first record."""

    strips: Sequence[Strip] = ()
    length_s: float = 0.0
    bin_s: float = 0.0
    breaks: Sequence[Break] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Processes without a strip, by role, because there are too many."""
    unknown: Sequence[str] = ()
    """Processes that left a trace file or pulses, but nothing that says what they did."""
    missing: str = "no process has recorded its main activity"

    @property
    def activities(self) -> list[str]:
        """All activities, ordered by total time."""
        total: Counter[str] = Counter()
        for strip in self.strips:
            total.update({activity: max(1, math.ceil(seconds)) for activity, seconds in strip.seconds.items()})
        return [activity for activity, _ in total.most_common()]


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _LaneName(msgspec.Struct):
    name: str = ""


_decoder = msgspec.json.Decoder(_Event)
_lane_decoder = msgspec.json.Decoder(_LaneName)


@dataclass
class _Found:
    """Data read of one process."""

    name: str
    source: Literal["trace", "pulses"]
    grids: dict[str, ActivityGrid] = field(default_factory=dict)
    """By lane."""
    starts_s: list[float] = field(default_factory=list)
    """Time of the first slice of each incarnation of the process."""


def read_timeline(data: RunData, *, max_bins: int = MAX_BINS, max_per_role: int = MAX_PER_ROLE) -> Timeline:
    """Read the strips of a run, from its traces, or from its pulses for processes without a trace."""
    traces = {path.name.removesuffix(".trace.jsonl"): path for path in sorted(data.folder.logs.glob("*.trace.jsonl"))}
    in_pulses = {str(name) for pulse in data.pulses for name in pulse["processes"]}
    chosen, left_out = _choose({*traces, *in_pulses}, max_per_role)
    found: list[_Found] = []
    unknown: list[str] = []
    for name in chosen:
        one = _read_trace(name, traces[name]) if name in traces else _Found(name, "trace")
        if MAIN_LANE not in one.grids:
            one.grids |= _read_pulses(name, data.pulses).grids
            one.source = "pulses"
        if MAIN_LANE in one.grids:
            found.append(one)
        else:
            unknown.append(name)
    if not found:
        return Timeline(left_out=left_out, unknown=unknown)
    return replace(_laid_out(found, max_bins), left_out=left_out, unknown=unknown)


class PulseTimeline:
    """Strips from pulses alone, added one by one while the run is in progress: coarser than traces, and cheap."""

    def __init__(self) -> None:
        self._strips: dict[str, _PulseStrip] = {}

    def add(self, pulse: Mapping[str, Any]) -> None:
        """Add one pulse."""
        for name in pulse["processes"]:
            self._strips.setdefault(str(name), _PulseStrip(str(name)))
        for strip in self._strips.values():
            strip.add(pulse)

    def timeline(self, *, max_bins: int = MAX_BINS, max_per_role: int = MAX_PER_ROLE) -> Timeline:
        """Return all strips so far, over one axis."""
        chosen, left_out = _choose(self._strips, max_per_role)
        found = [self._strips[name].found for name in chosen]
        known = [one for one in found if MAIN_LANE in one.grids]
        unknown = [one.name for one in found if MAIN_LANE not in one.grids]
        if not known:
            return Timeline(left_out=left_out, unknown=unknown)
        return replace(_laid_out(known, max_bins), left_out=left_out, unknown=unknown)


def role_of(name: str) -> str:
    """Role of a process by its name: `rollout-12` is a rollout worker."""
    return re.sub(r"-\d+$", "", name)


def _natural(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sort key: roles in order of the pipeline, `rollout-2` before `rollout-10`."""
    role = role_of(name)
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
    return (ROLES.index(role) if role in ROLES else len(ROLES)), parts


def _choose(names: Iterable[str], max_per_role: int) -> tuple[list[str], dict[str, int]]:
    chosen: list[str] = []
    seen: Counter[str] = Counter()
    for name in sorted(names, key=_natural):
        seen[role_of(name)] += 1
        if seen[role_of(name)] <= max_per_role:
            chosen.append(name)
    return chosen, {role: count - max_per_role for role, count in seen.items() if count > max_per_role}


# ------------------------------------------------------------ traces


def _read_trace(name: str, path: Path) -> _Found:
    """Read one file line by line. Lines truncated by a crash and unknown lines are skipped."""
    found = _Found(name, "trace")
    lanes: dict[int, NestedLane] = {}
    markers: tuple[bytes, ...] = ()
    is_new = True
    with path.open("rb") as lines:
        for line in lines:
            is_meta = b'"ph":"M"' in line
            if not is_meta and not any(marker in line for marker in markers):
                continue
            try:
                event = _decoder.decode(line)
            except msgspec.MsgspecError:
                continue
            if is_meta:
                if event.name == "process_name":  # a restarted process numbers its lanes from the start
                    lanes, markers, is_new = {}, (), True
                elif event.name == "thread_name":
                    lane = _lane_name(event.args)
                    if lane == MAIN_LANE or lane in SIDE_LANES:
                        lanes[event.tid] = NestedLane(found.grids.setdefault(lane, ActivityGrid()))
                        markers += (b'"tid":%d}' % event.tid, b'"tid":%d,' % event.tid)
            elif event.ph == "X" and event.tid in lanes and math.isfinite(event.ts + event.dur):
                lanes[event.tid].add(event.name, event.ts / 1e6, (event.ts + event.dur) / 1e6)
                if is_new:
                    found.starts_s.append(event.ts / 1e6)
                    is_new = False
    found.grids = {lane: grid for lane, grid in found.grids.items() if grid.bins}
    return found


def _lane_name(args: msgspec.Raw) -> str:
    try:
        return _lane_decoder.decode(args).name
    except msgspec.MsgspecError:
        return ""


# ------------------------------------------------------------ pulses


def _read_pulses(name: str, pulses: Sequence[Mapping[str, Any]]) -> _Found:
    strip = _PulseStrip(name)
    for pulse in pulses:
        strip.add(pulse)
    return strip.found


class _PulseStrip:
    """Shares of one process from the growth of its counters between two pulses, else from its reported state."""

    def __init__(self, name: str) -> None:
        self._name, self._grid = name, ActivityGrid()
        self._before: tuple[float, Mapping[str, Any]] | None = None

    @property
    def found(self) -> _Found:
        """Data so far."""
        return _Found(self._name, "pulses", {MAIN_LANE: self._grid} if self._grid.bins else {})

    def add(self, pulse: Mapping[str, Any]) -> None:
        """Add one pulse."""
        now_s, process, before = number(pulse.get("time_s")), pulse["processes"].get(self._name), self._before
        if now_s is None or process is None:
            self._before = None
            return
        if before is not None and before[0] < now_s and before[1].get("incarnation") == process.get("incarnation"):
            for activity, seconds in _grown(role_of(self._name), before[1], process, now_s - before[0]).items():
                self._grid.add(activity, before[0], now_s, weight=seconds / (now_s - before[0]))
        self._before = (now_s, process)


def _grown(role: str, old: Mapping[str, Any], new: Mapping[str, Any], elapsed_s: float) -> dict[str, float]:
    counted = {}
    for key, activity in _COUNTER_ACTIVITIES.get(role, {}).items():
        grown = (number(new["counters"].get(key)) or 0.0) - (number(old["counters"].get(key)) or 0.0)
        if grown > 0:
            counted[activity] = grown
    total_s = sum(counted.values())
    if total_s > elapsed_s:  # counters of several threads, or a heartbeat between the pulses
        counted = {activity: seconds * elapsed_s / total_s for activity, seconds in counted.items()}
    state = new.get("state")
    return counted or ({state: elapsed_s} if isinstance(state, str) and state else {})


# ------------------------------------------------------------ one axis for all


def _laid_out(found: Sequence[_Found], max_bins: int) -> Timeline:
    grids = [grid for one in found for grid in one.grids.values()]
    doublings = widest(grids)
    width_s = grids[0].width_s * 2.0 ** (doublings - grids[0].doublings)
    occupied = sorted({index >> (doublings - grid.doublings) for grid in grids for index in grid.bins})
    starts_s = [start_s for one in found for start_s in one.starts_s]
    place, num_bins, breaks = _places(occupied, starts_s, width_s)
    per_bin = math.ceil(num_bins / max(1, min(max_bins, MAX_TOTAL_BINS // len(grids))))
    strips = []
    for one in found:
        for lane, grid in one.grids.items():
            name = one.name if lane == MAIN_LANE else f"{one.name}: {lane}"
            seconds = grid.folded(doublings)
            strips.append(_strip(name, one.source, seconds, place, num_bins, per_bin, width_s))
    return Timeline(
        strips=strips,
        length_s=num_bins * width_s,
        bin_s=per_bin * width_s,
        breaks=[Break(at * width_s, rest_s) for at, rest_s in breaks],
    )


def _places(
    occupied: Sequence[int], starts_s: Sequence[float], width_s: float
) -> tuple[dict[int, int], int, list[tuple[int, float]]]:
    """Position of each bin on the axis, the axis's length in bins, and the breaks that were cut out.

    A break: no process recorded anything for a while, and then a newly started process did.
    """
    place: dict[int, int] = {}
    breaks: list[tuple[int, float]] = []
    shift, last = occupied[0], occupied[0] - 1
    for index in occupied:
        rest_s = (index - last - 1) * width_s
        if rest_s > MIN_BREAK_S and any((last + 1) * width_s < start_s < (index + 1) * width_s for start_s in starts_s):
            shift += index - last - 1
            breaks.append((index - shift, rest_s))
        place[index] = index - shift
        last = index
    return place, last + 1 - shift, breaks


def _strip(
    name: str, source: Literal["trace", "pulses"], seconds: Mapping[str, Mapping[int, float]],
    place: Mapping[int, int], num_bins: int, per_bin: int, width_s: float,
) -> Strip:  # fmt: skip
    num_wide = math.ceil(num_bins / per_bin)
    wide = {activity: np.zeros(num_wide + 1) for activity in seconds}
    for activity, bins in seconds.items():
        for index, part_s in bins.items():
            wide[activity][place[index] // per_bin] += part_s
    matrix = np.clip(np.array(list(wide.values())) / (per_bin * width_s), 0.0, 1.0)
    matrix /= np.maximum(matrix.sum(axis=0), 1.0)
    recorded = np.flatnonzero(matrix[:, :-1].sum(axis=0) > 0)
    begin, end = (int(recorded[0]), int(recorded[-1]) + 1) if len(recorded) else (0, 0)
    rounded = np.round(matrix, 3)
    changes = [0, *(np.flatnonzero(np.any(rounded[:, 1:] != rounded[:, :-1], axis=0)) + 1).tolist(), num_wide]
    kept = sorted({change for change in changes if begin <= change <= end} | {begin, end})
    totals = {activity: sum(bins.values()) for activity, bins in seconds.items()}
    return Strip(
        name=name,
        role=role_of(name.partition(":")[0]),
        source=source,
        xs_s=[tidy(index * per_bin * width_s) for index in kept],
        shares={activity: rounded[row, kept].tolist() for row, activity in enumerate(wide)},
        seconds={key: round(total_s, 3) for key, total_s in sorted(totals.items(), key=lambda item: -item[1])},
        span_s=(end - begin) * per_bin * width_s,
    )
