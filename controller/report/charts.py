"""Chart data shared by both renderers: page (plotly) and picture (matplotlib).

Defines series and axes, thins long series, computes histograms and time axes. The charts of a run are in run_charts.py
and flow_charts.py, the renderers in page.py and picture.py.

Every number in a chart is finite or None (a gap). A chart without numbers says in `missing` which data it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from controller.report.colours import DASHES

MAX_NUMBER = 1e100
"""Largest number that is drawn; a damaged row may contain larger ones."""
MAX_POINTS = 800
"""Points of one series; a longer one is binned, and the chart says so."""

Kind = Literal["line", "steps", "dots", "bars", "stacked"]
"""`line`; `steps`: the value is constant until the next x; `dots`: measured points, joined; `bars`: side by side;
`stacked`: bars on top of each other.
"""
Emphasis = Literal["plain", "faint", "bold", "limit"]
"""`faint`: raw values behind a mean; `limit`: a level from the configuration."""
Scale = Literal["linear", "log"]

Number = float | None
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Axis:
    """Quantity of an axis. `unit` is printed after the label; `is_share` prints 0.5 as 50 %."""

    label: str
    unit: str = ""
    is_share: bool = False
    scale: Scale = "linear"
    bottom: float | None = None
    top: float | None = None

    @property
    def title(self) -> str:
        """Label and unit, as printed next to the axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class Series:
    """One curve or one set of bars. `colour` is a name of colours.py, `dash` one of its DASHES."""

    name: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[Number]
    kind: Kind = "line"
    colour: str = "c0"
    dash: str = "solid"
    emphasis: Emphasis = "plain"

    @property
    def has_numbers(self) -> bool:
        """Whether there is anything to draw."""
        return any(y is not None for y in self.ys)


@dataclass(frozen=True)
class Chart:
    """One chart. `key` is its anchor in the page; `caption` explains it."""

    key: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series] = ()
    caption: str = ""
    missing: str = "nothing was recorded"

    @property
    def drawn(self) -> list[Series]:
        """The series that have numbers."""
        return [series for series in self.series if series.has_numbers]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw: `missing` says why."""
        return all(series.emphasis == "limit" for series in self.drawn)


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    key: str
    title: str
    charts: Sequence[Chart] = field(default_factory=tuple)


STEP = Axis("step")
NO_STEPS = "no step has been finished"


def number(value: Any) -> Number:
    """A number that can be drawn, or None for anything else (null, NaN, text or booleans of a damaged row)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) < MAX_NUMBER else None
    except OverflowError:  # a damaged row may contain an integer of any length
        return None


def column(rows: Iterable[Mapping[str, Any]], key: str) -> list[Number]:
    """One field of each row."""
    return [number(row.get(key)) for row in rows]


def curve(
    name: str, xs: Sequence[Number], ys: Sequence[Number], *, colour: str = "c0", dash: str = "solid",
    emphasis: Emphasis = "plain", kind: Kind = "line", by: Callable[[Any], Any] = np.mean,
    max_points: int = MAX_POINTS,
) -> Series:  # fmt: skip
    """A series of the points that have an x, thinned with `by` (np.max if peaks matter)."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    thin_xs, thin_ys = thinned([x for x, _ in pairs], [y for _, y in pairs], max_points=max_points, by=by)
    return Series(name, thin_xs, thin_ys, kind=kind, colour=colour, dash=dash, emphasis=emphasis)


def thinned(
    xs: Sequence[float], ys: Sequence[Number], *, max_points: int = MAX_POINTS, by: Callable[[Any], Any] = np.mean
) -> tuple[list[float], list[Number]]:
    """At most `max_points` points: each the last x and `by` of the numbers of equally many neighbours."""
    per_point = points_per_bin(len(xs), max_points)
    if per_point == 1:
        return [tidy(x) for x in xs], [None if y is None else tidy(y) for y in ys]
    thin_xs: list[float] = []
    thin_ys: list[Number] = []
    for start in range(0, len(xs), per_point):
        found = [y for y in ys[start : start + per_point] if y is not None]
        thin_xs.append(tidy(xs[min(start + per_point, len(xs)) - 1]))
        thin_ys.append(tidy(float(by(np.asarray(found)))) if found else None)
    return thin_xs, thin_ys


def points_per_bin(num_points: int, max_points: int = MAX_POINTS) -> int:
    """Number of neighbours that one drawn point represents."""
    return max(1, math.ceil(num_points / max_points))


def tidy(value: float) -> float:
    """Round to six significant digits, more than a chart can show, to keep the page small."""
    return float(f"{value:.6g}")


def shortened(name: str, max_chars: int) -> str:
    """Shorten a name in its middle: names of runs of a sweep differ at their ends."""
    if len(name) <= max_chars:
        return name
    begin = (max_chars - 1) // 3
    return f"{name[:begin]}…{name[len(name) - (max_chars - 1 - begin) :]}"


def running_mean(ys: Sequence[Number], window: int) -> list[Number]:
    """Mean of the last `window` numbers at each position."""
    means: list[Number] = []
    recent: list[Number] = []
    for y in ys:
        recent = [*recent[-(window - 1) :], y] if window > 1 else [y]
        found = [value for value in recent if value is not None]
        means.append(sum(found) / len(found) if found else None)
    return means


def level(name: str, xs: Sequence[Number], value: float | None, *, colour: str = "c6") -> list[Series]:
    """A level from the configuration over the span of `xs`; empty if it is not set or nothing is drawn."""
    known = [x for x in xs if x is not None]
    if value is None or not known:
        return []
    return [Series(name, [known[0], known[-1]], [value, value], colour=colour, dash="dash", emphasis="limit")]


def histogram(name: str, values: Any, edges: Any, *, colour: str, dash: str = "solid") -> Series:
    """Shares of `values` between `edges`, as steps."""
    counts, _ = np.histogram(values, bins=edges)
    total = max(int(counts.sum()), 1)
    shares = [tidy(float(count) / total) for count in counts]
    return Series(name, [float(edge) for edge in edges], [*shares, shares[-1]], "steps", colour, dash)


def thinning_words(num_rows: int) -> str:
    """A sentence for the caption if a point represents several steps; else empty."""
    per_point = points_per_bin(num_rows, MAX_POINTS)
    return f" Each point stands for {per_point} steps." if per_point > 1 else ""


def of_steps(
    steps: Rows, key: str, title: str, y: Axis, lines: Sequence[tuple[str, str, str]], caption: str,
    by: Callable[[Any], Any] = np.mean, more: Sequence[Series] = (),
) -> Chart:  # fmt: skip
    """A chart of one or several fields of the step rows: (field, name, colour)."""
    xs = column(steps, "step")
    series = [
        curve(name, xs, column(steps, field), colour=colour, dash=DASHES[place % len(DASHES)], by=by)
        for place, (field, name, colour) in enumerate(lines)
    ]
    missing = "the steps do not contain these metrics" if steps else NO_STEPS
    return Chart(key, title, STEP, y, [*series, *more], caption + thinning_words(len(steps)), missing)


def elapsed_s(seconds: Sequence[Number]) -> list[Number]:
    """Times that restart at zero with every session of a resumed run, as one continuous time."""
    total: list[Number] = []
    offset = previous = 0.0
    for second in seconds:
        if second is not None and second < previous:
            offset += previous
        total.append(None if second is None else offset + second)
        previous = previous if second is None else second
    return total


def clock(seconds: Sequence[Number]) -> tuple[Axis, list[Number]]:
    """A time axis with a unit suitable for its length, and the times (see elapsed_s) in that unit."""
    total = elapsed_s(seconds)
    unit, per_unit = time_unit(max((second for second in total if second is not None), default=0.0))
    return Axis("time", unit), [None if second is None else tidy(second / per_unit) for second in total]


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for a span of so many seconds, and its length in seconds."""
    if seconds < 600:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
