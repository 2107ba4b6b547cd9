"""Compares runs: differences of settings, results, and curves over steps and over time.

Drawing is in page.py and picture.py. The comparison does not rate the runs: one seed each proves little, as the page
says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.errors import UserError
from controller.report import overview, picture
from controller.report.charts import (
    STEP,
    Axis,
    Chart,
    Number,
    Section,
    Series,
    column,
    curve,
    elapsed_s,
    number,
    running_mean,
    shortened,
    tidy,
    time_unit,
)
from controller.report.colours import DASHES, NUM_CATEGORIES
from controller.report.data import RunData
from controller.report.files import make_folder
from controller.report.flow_charts import class_names, staleness_classes, staleness_of
from controller.report.page import chart_classes, render, write_page
from controller.report.run_charts import MEAN_WINDOW, MIN_STEPS_FOR_MEAN, eval_points
from controller.report.shares import measure
from controller.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, PICTURE = "compare.html", "compare.png"
MAX_CELL_CHARS = 30
_IGNORED = ("name",)
"""Keys of the configuration whose differences are ignored."""


@dataclass(frozen=True)
class Row:
    """One line of a table: a label and a cell per run."""

    label: str
    cells: Sequence[str]
    ratio: str = ""
    """Ratio of the second run to the first, if two runs are compared and a ratio of this number is meaningful."""


@dataclass(frozen=True)
class Side:
    """One run of the comparison. `label` is its name, made unique."""

    label: str
    data: RunData
    place: int

    @property
    def colour(self) -> str:
        """Colour of its curves."""
        return f"c{self.place % NUM_CATEGORIES}"

    @property
    def dash(self) -> str:
        """Dash of its curves; runs that share a colour differ in it."""
        return DASHES[(self.place + self.place // NUM_CATEGORIES) % len(DASHES)]


def compare(folders: Sequence[RunFolder], out: Path | None = None) -> str:
    """Return the comparison as text; write compare.html and compare.png into `out` (None: next to the first run's
    folder).

    Raises UserError for fewer than two runs, a run that cannot be read, or a folder that cannot be written to.
    """
    if len(folders) < 2:
        raise UserError(
            "a comparison requires at least two runs",
            where="compare",
            remedy="specify two or more runs: areal-like compare RUN RUN",
        )
    sides = _sides(folders)
    differences, numbers = config_rows(sides), summary_rows(sides)
    found = sections(sides)
    folder = out if out is not None else folders[0].root.parent
    make_folder(folder)
    write_page(folder / PAGE, _page(sides, differences, numbers, found))
    picture.save(_sheet(sides, found), folder / PICTURE)
    return _text(sides, differences, numbers) + f"\n\n{folder / PAGE}\n{folder / PICTURE}"


def _sides(folders: Sequence[RunFolder]) -> list[Side]:
    names = Counter(folder.name for folder in folders)
    sides = []
    for place, folder in enumerate(folders):
        label = folder.name if names[folder.name] == 1 else f"{folder.root.parent.name}/{folder.name} ({place + 1})"
        sides.append(Side(overview.text(label, 60), RunData.load(folder), place))
    return sides


# ------------------------------------------------------------ tables


def config_rows(sides: Sequence[Side]) -> list[Row]:
    """The keys that are set differently, in the order of the first configuration that has them."""
    flat = [dict(_flat(side.data.config)) for side in sides]
    keys = [key for key in dict.fromkeys(itertools.chain.from_iterable(flat)) if key not in _IGNORED]
    rows = []
    for key in keys:
        values = [one.get(key, "not set") for one in flat]
        if len(set(values)) > 1:
            rows.append(Row(overview.text(key, 80), [overview.text(value, 200) for value in values]))
    return rows


def _flat(found: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Values by dotted path; lists count as values."""
    if not isinstance(found, Mapping) or not found:
        return [(prefix, "null" if found is None else str(found))] if prefix else []
    return [leaf for key, value in found.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]


def summary_rows(sides: Sequence[Side]) -> list[Row]:
    """Results of each run; `-` if a run did not get that far."""
    state = Row("status", [side.data.where.kind if side.data.where else "unknown" for side in sides])
    return [state, *(_number_row(sides, label, words, read, is_rate) for label, words, read, is_rate in _NUMBERS)]


def _number_row(sides: Sequence[Side], label: str, words: str, read: Callable[[RunData], Number], is_rate: bool) -> Row:
    values = [read(side.data) for side in sides]
    cells = ["-" if value is None else words.format(value) for value in values]
    first, second = values[0], values[1]
    has_ratio = is_rate and len(values) == 2 and first is not None and second is not None and first > 0
    return Row(label, cells, f"{second / first:.2f}" if has_ratio else "")  # type: ignore[operator]


def _of_summary(key: str) -> Callable[[RunData], Number]:
    return lambda data: number((data.summary or {}).get(key))


def _last_accuracy(data: RunData) -> Number:
    points = eval_points(data)
    return points[-1][1] if points else None


def _best_accuracy(data: RunData) -> Number:
    return max((accuracy for _, accuracy in eval_points(data)), default=None)


def _mean(key: str, rows: slice = slice(None)) -> Callable[[RunData], Number]:
    def read(data: RunData) -> Number:
        found = [value for value in column(data.steps[rows], key) if value is not None]
        return sum(found) / len(found) if found else None

    return read


def _share_of(name: str) -> Callable[[RunData], Number]:
    """The share as shown on the run's own page: without start and end if the run is long enough."""

    def read(data: RunData) -> Number:
        value = float(getattr(measure(data), name))
        return value if math.isfinite(value) else None

    return read


_trainer_waited = _share_of("trainer_wait")


def _highest(key: str) -> Callable[[RunData], Number]:
    return lambda data: max((value for value in column(data.steps, key) if value is not None), default=None)


def _rate(key: str) -> Callable[[RunData], Number]:
    """Samples or tokens per second over the time of all sessions, from the steps."""

    def read(data: RunData) -> Number:
        total = sum(value for value in column(data.steps, key) if value is not None)
        seconds = [second for second in wall_s(data) if second is not None]
        return total / seconds[-1] if total and seconds and seconds[-1] > 0 else None

    return read


def _train_s(data: RunData) -> Number:
    seconds = [second for second in wall_s(data) if second is not None]
    return seconds[-1] if seconds else None


_NUMBERS: Sequence[tuple[str, str, Callable[[RunData], Number], bool]] = (
    ("steps", "{:,.0f}", lambda data: float(len(data.steps)), False),
    ("accuracy before", "{:.3f}", _of_summary("accuracy_before"), False),
    ("accuracy, last", "{:.3f}", _last_accuracy, False),
    ("accuracy, best", "{:.3f}", _best_accuracy, False),
    (f"reward, last {MEAN_WINDOW} steps", "{:.3f}", _mean("reward_mean", slice(-MEAN_WINDOW, None)), False),
    ("samples/s", "{:,.2f}", _rate("num_samples"), True),
    ("sampled tokens/s", "{:,.0f}", _rate("num_sampled_tokens"), True),
    ("time from first lease to last step, s", "{:,.1f}", _train_s, True),
    ("trainer waited, share", "{:.1%}", _trainer_waited, False),
    ("rollout idle, share", "{:.1%}", _share_of("rollout_idle"), False),
    ("rollout paused, share", "{:.1%}", _share_of("rollout_paused"), False),
    ("staleness, mean", "{:.2f}", _mean("staleness_mean"), False),
    ("staleness, max", "{:.0f}", _highest("staleness_max"), False),
    ("entropy, last 10 steps, nats", "{:.4f}", _mean("entropy", slice(-10, None)), False),
    ("effective sample size, mean", "{:.1%}", _mean("ess"), False),
    ("groups dropped", "{:,.0f}", _of_summary("groups_dropped"), False),
    ("groups filtered", "{:,.0f}", _of_summary("groups_filtered"), False),
)
"""Label, format, source, and whether the ratio of two runs is meaningful."""


def _text(sides: Sequence[Side], differences: Sequence[Row], numbers: Sequence[Row]) -> str:
    header = ["", *(side.label for side in sides)]
    ratios = any(row.ratio for row in numbers)
    tables = [
        _aligned([[*header, *(["ratio"] if ratios else [])],
                  *([row.label, *row.cells, *([row.ratio] if ratios else [])] for row in numbers)]),
        _aligned([["set differently", *header[1:]], *([row.label, *row.cells] for row in differences)])
        if differences else "all settings are the same",
    ]  # fmt: skip
    return "\n\n".join(tables)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    cut = [[shortened(cell, MAX_CELL_CHARS) if place else cell for place, cell in enumerate(row)] for row in rows]
    widths = [max(len(row[place]) for row in cut) for place in range(len(cut[0]))]
    lines = []
    for row in cut:
        cells = [cell.ljust(width) if not place else cell.rjust(width)
                 for place, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ------------------------------------------------------------ charts


def wall_s(data: RunData) -> list[Number]:
    """Seconds of work up to each step, without the time between sessions."""
    return elapsed_s(column(data.steps, "wall_s"))


def sections(sides: Sequence[Side]) -> list[Section]:
    """The charts of a comparison."""
    return [
        Section("learning", "Learning", (_reward(sides, by_time=False), _reward(sides, by_time=True),
                                         _accuracy(sides, by_time=False), _accuracy(sides, by_time=True))),
        Section("speed", "Throughput", (_bars(sides, "chart-samples", "Samples per second", "samples/s", "num_samples"),
                                        _bars(sides, "chart-tokens", "Tokens per second", "tokens/s",
                                              "num_sampled_tokens"), _waits(sides))),
        Section("staleness", "Staleness", (_staleness(sides),)),
    ]  # fmt: skip


def _times(sides: Sequence[Side]) -> tuple[Axis, list[list[Number]]]:
    """One time axis for all runs, with a unit suitable for the longest."""
    seconds = [wall_s(side.data) for side in sides]
    unit, per_unit = time_unit(max((s for one in seconds for s in one if s is not None), default=0.0))
    return Axis("time", unit), [[None if s is None else tidy(s / per_unit) for s in one] for one in seconds]


def _reward(sides: Sequence[Side], *, by_time: bool) -> Chart:
    axis, times = _times(sides)
    series = []
    for side, seconds in zip(sides, times, strict=True):
        ys = column(side.data.steps, "reward_mean")
        if len(ys) >= MIN_STEPS_FOR_MEAN:
            ys = running_mean(ys, MEAN_WINDOW)
        xs = seconds if by_time else column(side.data.steps, "step")
        series.append(curve(side.label, xs, ys, colour=side.colour, dash=side.dash))
    key, title = ("chart-reward-time", "Reward by time") if by_time else ("chart-reward", "Reward by step")
    caption = f"Reward of the consumed samples; from {MIN_STEPS_FOR_MEAN} steps on, the mean of {MEAN_WINDOW} steps."
    return Chart(key, title, axis if by_time else STEP, Axis("reward"), series, caption, "no run has steps")


def _accuracy(sides: Sequence[Side], *, by_time: bool) -> Chart:
    axis, times = _times(sides)
    series = []
    for side, seconds in zip(sides, times, strict=True):
        known = {0.0: 0.0} | {
            float(row["step"]): s for row, s in zip(side.data.steps, seconds, strict=True) if s is not None
        }
        points = [(v, a) for v, a in eval_points(side.data) if not by_time or v in known]
        xs = [known[v] if by_time else v for v, _ in points]
        series.append(Series(side.label, xs, [a for _, a in points], "dots", side.colour, side.dash))
    key, title = ("chart-accuracy-time", "Accuracy by time") if by_time else ("chart-accuracy", "Accuracy by step")
    caption = "Accuracy on held-out prompts, at the version that was evaluated" + (
        " (the time when it was published)." if by_time else "."
    )
    return Chart(key, title, axis if by_time else STEP, Axis("accuracy"), series, caption, "no run was evaluated")


def _bars(sides: Sequence[Side], key: str, title: str, unit: str, field: str) -> Chart:
    known = [(side.label, _rate(field)(side.data)) for side in sides]
    bars = Series(unit, [label for label, _ in known], [value for _, value in known], "bars", "c2")
    caption = "Over the time from the first lease to the last step."
    return Chart(key, title, Axis("run"), Axis(unit, bottom=0.0), [bars], caption, "no run has steps")


def _waits(sides: Sequence[Side]) -> Chart:
    names = [side.label for side in sides]
    series = [
        Series(label, names, [read(side.data) for side in sides], "bars", colour)
        for label, read, colour in (
            ("trainer waited", _trainer_waited, "c1"),
            ("rollout idle", _of_summary("rollout_idle_share"), "c0"),
            ("rollout paused", _of_summary("rollout_paused_share"), "c3"),
        )
    ]
    caption = (
        "Fractions of the time of the trainer and of the rollout workers. The latter are known only for runs that have "
        "ended."
    )
    y = Axis("share of time", is_share=True, bottom=0.0)
    return Chart("chart-waits", "Waiting", Axis("run"), y, series, caption, "no run has steps")


def _staleness(sides: Sequence[Side]) -> Chart:
    found = [Counter(value for row in side.data.steps for value in staleness_of(row)) for side in sides]
    classes = staleness_classes(max((value for one in found for value in one), default=0))
    series = []
    for side, one in zip(sides, found, strict=True):
        total = sum(one.values())
        if total:
            shares = [sum(n for v, n in one.items() if low <= v <= high) / total for low, high in classes]
            series.append(Series(side.label, class_names(classes), shares, "bars", side.colour))
    caption = "Share of the consumed groups of each run by staleness."
    x, y = Axis("staleness", "versions"), Axis("share of groups", is_share=True, bottom=0.0)
    return Chart("chart-staleness", "Staleness", x, y, series, caption, "no run has steps")


# ------------------------------------------------------------ page and picture


def _page(sides: Sequence[Side], differences: Sequence[Row], numbers: Sequence[Row], found: Sequence[Section]) -> str:
    contents = [("numbers", "Numbers"), ("differences", "Set differently"), *((one.key, one.title) for one in found)]
    return render(
        "compare.html.j2",
        charts=[chart for section in found for chart in section.charts],
        contents=contents,
        sides=sides,
        differences=differences,
        numbers=numbers,
        has_ratios=any(row.ratio for row in numbers),
        sections=found,
        classes=chart_classes(found),
        problems=[(side.label, overview.text(problem)) for side in sides for problem in side.data.problems],
    )


def _sheet(sides: Sequence[Side], found: Sequence[Section]) -> Figure:
    charts = [chart for section in found for chart in section.charts if not chart.is_empty]
    rows = [charts[at : at + 2] for at in range(0, len(charts), 2)]
    names = " · ".join(side.label for side in sides)
    title = names if len(names) <= picture.MAX_TITLE_CHARS else f"{len(sides)} runs compared"
    return picture.sheet(title, [], rows)
