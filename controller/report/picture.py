"""Renders report.png: the charts of the page on one sheet, for messages and slides.

Draws charts and activity strips with matplotlib, which is imported when something is drawn and used without pyplot, so
that any thread may draw. The content is in run_charts.py and timeline.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.errors import UserError
from controller.report import colours, overview
from controller.report.charts import Axis, Chart, Section, Series, shortened, time_unit
from controller.report.colours import LIGHT
from controller.report.data import RunData
from controller.report.files import replace_file
from controller.report.finding import Finding, sentences
from controller.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDER: Sequence[Sequence[str]] = (
    ("chart-learning", "chart-learning", "chart-staleness-time"),
    ("chart-throughput", "chart-waiting", "chart-flight"),
    ("chart-components", "chart-lengths", "chart-length-histogram"),
    ("chart-clip", "chart-entropy", "chart-kl"),
    ("chart-ess", "chart-gradient", "chart-weights"),
    ("chart-verdicts", "chart-verdicts", "chart-queue"),
    ("chart-memory", "chart-memory", "chart-cores"),
)
WIDTH_IN, DPI = 17.0, 100
ROW_IN, HEADER_IN, STRIP_IN = 3.15, 1.5, 0.42
LEGEND_CHARS = 198
"""Characters of legend that fit next to each other above a chart of the sheet's full width."""
MAX_NAME_CHARS = 42
MAX_TITLE_CHARS = 80
MAX_LABELLED_BARS = 36
"""Numbers that fit next to each other on the bars of a chart of the sheet's full width."""
MAX_TICK_CHARS = 180
"""Characters of names that fit next to each other below a chart of the sheet's full width."""
HEADER_CHARS = 170
_DASH = {"solid": "-", "dash": (0, (5, 2.5)), "dot": (0, (1.2, 1.8)), "dashdot": "-.", "longdash": (0, (9, 3))}
_WIDTH = {"plain": 1.5, "faint": 0.8, "bold": 2.4, "limit": 1.0}


def run_sheet(
    data: RunData,
    findings: Sequence[Finding],
    sections: Sequence[Section],
    timeline: Timeline | None,
    order: Sequence[Sequence[str]] = ORDER,
) -> Figure:
    """Draw the sheet of a run, its charts by key in the rows of `order`. Raises UserError without matplotlib."""
    charts = {chart.key: chart for section in sections for chart in section.charts}
    rows = [[charts[key] for key in keys] for keys in order if any(not charts[key].is_empty for key in keys)]
    numbers = "   ".join(f"{figure.label} {figure.value}" for figure in overview.figures(data))
    verdict = sentences(findings[0].title, findings[0].advice) if findings else ""
    return sheet(data.folder.name, [verdict, numbers], rows, timeline)


def sheet(
    title: str, paragraphs: Sequence[str], rows: Sequence[Sequence[Chart]], timeline: Timeline | None = None
) -> Figure:
    """Draw charts in rows under a heading; a chart named twice in a row spans two columns. Raises UserError."""
    num_columns = max((len(row) for row in rows), default=1)
    strips_in = [0.9 + STRIP_IN * max(1, len(timeline.strips))] if timeline is not None else []
    heights = [HEADER_IN if any(paragraphs) else 0.5, *[ROW_IN] * len(rows), *strips_in]
    figure = _new_figure(WIDTH_IN, sum(heights))
    grid = figure.add_gridspec(len(heights), num_columns, height_ratios=heights)
    _header(figure.add_subplot(grid[0, :]), title, paragraphs)
    for place, row in enumerate(rows, start=1):
        for chart in {chart.key: chart for chart in row}.values():
            columns = [at for at, one in enumerate(row) if one.key == chart.key]
            share = len(columns) / num_columns
            draw_chart(figure.add_subplot(grid[place, columns[0] : columns[-1] + 1]), chart, share=share)
    if timeline is not None:
        draw_strips(figure.add_subplot(grid[len(heights) - 1, :]), timeline)
    return figure


def _new_figure(width_in: float, height_in: float) -> Figure:
    """Make an empty sheet. Raises UserError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "the `matplotlib` package is not installed", where="report", remedy="pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained", facecolor=LIGHT["paper"])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
    return figure


def save(figure: Figure, path: Path) -> None:
    """Replace the picture atomically. Raises UserError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    replace_file(path, lambda fresh: FigureCanvasAgg(figure).print_png(str(fresh)))


def _header(axes: Axes, title: str, paragraphs: Sequence[str]) -> None:
    axes.set_axis_off()
    style: Mapping[str, Any] = {"va": "top", "transform": axes.transAxes, "color": LIGHT["ink"]}
    axes.text(0, 1, literal(shortened(title, MAX_TITLE_CHARS)), fontsize=18, weight="bold", **style)
    lines = [line for words in paragraphs
             for line in textwrap.wrap(overview.text(words), HEADER_CHARS, max_lines=2, placeholder=" …")]  # fmt: skip
    axes.text(0, 0.68, "\n".join(literal(line) for line in lines), fontsize=11, linespacing=1.5, **style)


# ------------------------------------------------------------ one chart


def draw_chart(axes: Axes, chart: Chart, *, share: float = 1.0) -> None:
    """Draw one chart; `share`: its share of the sheet's width. A chart without numbers says why."""
    _dress(axes)
    if chart.is_empty:
        axes.set_title(literal(chart.title), loc="left", fontsize=11, weight="bold", color=LIGHT["ink"])
        axes.set_xticks([])
        axes.set_yticks([])
        words = "\n".join(textwrap.wrap(overview.text(chart.missing), 44))
        axes.text(0.5, 0.5, literal(words), ha="center", va="center", style="italic", color=LIGHT["muted"],
                  transform=axes.transAxes)  # fmt: skip
        return
    stacked: dict[float, float] = {}
    bars = [series for series in chart.drawn if series.kind == "bars"]
    for series in chart.drawn:
        if series.kind == "stacked":
            _stacked(axes, series, stacked)
        elif series.kind == "bars":
            _bars(axes, series, bars.index(series), len(bars), chart.y, share)
        else:
            _line(axes, series)
    _axes(axes, chart)
    rows = _legend(axes, chart, share)
    axes.set_title(literal(chart.title), loc="left", fontsize=11, weight="bold", color=LIGHT["ink"], pad=6 + 14 * rows)


def _dress(axes: Axes) -> None:
    axes.set_facecolor(LIGHT["paper"])
    axes.grid(color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=LIGHT["muted"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_color(LIGHT["grid"])


def _line(axes: Axes, series: Series) -> None:
    shade = LIGHT[series.colour]
    ys = [math.nan if y is None else y for y in series.ys]
    drawstyle = "steps-post" if series.kind == "steps" else "default"
    is_marked = series.kind == "dots" or len(series.xs) == 1
    axes.plot(
        series.xs, ys, color=shade, linewidth=_WIDTH[series.emphasis], linestyle=_DASH[series.dash],
        label=_name(series), alpha=0.55 if series.emphasis == "faint" else 1.0, drawstyle=drawstyle,
        marker="o" if is_marked else None,
        markersize=5 if len(series.xs) <= 40 else 2.5,
    )  # fmt: skip
    if series.kind == "steps":
        axes.fill_between(series.xs, ys, step="post", color=shade, alpha=0.12, linewidth=0)


def _stacked(axes: Axes, series: Series, below: dict[float, float]) -> None:
    xs = [float(x) for x in series.xs]
    width = min((b - a for a, b in pairwise(xs)), default=1.0)
    bottoms = [below.get(x, 0.0) for x in xs]
    heights = [y or 0.0 for y in series.ys]
    axes.bar(
        xs,
        heights,
        width,
        bottom=bottoms,
        color=LIGHT[series.colour],
        linewidth=0.4,
        edgecolor=LIGHT[series.colour],
        label=_name(series),
    )
    below.update({x: bottom + height for x, bottom, height in zip(xs, bottoms, heights, strict=True)})


def _bars(axes: Axes, series: Series, place: int, count: int, y: Axis, share: float) -> None:
    width = 0.7 / count
    xs = [index + (place - (count - 1) / 2) * width for index in range(len(series.xs))]
    heights = [value or 0.0 for value in series.ys]
    drawn = axes.bar(xs, heights, width, color=LIGHT[series.colour], label=_name(series))
    if len(xs) * count <= MAX_LABELLED_BARS * share:
        words = ["" if value is None else _amount(value, y) for value in series.ys]
        axes.bar_label(drawn, words, fontsize=9, color=LIGHT["ink"], padding=2)
    names = [_short(str(x)) for x in series.xs]
    is_crowded = sum(len(name) + 2 for name in names) > MAX_TICK_CHARS * share
    turned: Mapping[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_crowded else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.margins(y=0.16)
    if len(xs) < 3:
        axes.set_xlim(-1, len(xs))


def _amount(value: float, y: Axis) -> str:
    if y.is_share:
        return f"{value:.0%}"
    return f"{value:,.0f}" if value == round(value) or value >= 10_000 else f"{value:,.4g}"


def _short(name: str, max_chars: int = 18) -> str:
    return literal(shortened(overview.text(name), max_chars))


def _name(series: Series) -> str:
    return _short(series.name, MAX_NAME_CHARS)


def _axes(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if chart.y.is_share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g} %"))
    elif chart.y.scale == "linear":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.5g}"))
    if chart.y.scale == "log":
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        low, high = axes.get_ylim()
        if chart.y.bottom is not None:
            low = chart.y.bottom
            high = max(high + 0.04 * (high - low), low)
        if chart.y.top is not None:
            high = chart.y.top if chart.y.bottom is not None else chart.y.top + max(0.06 * (chart.y.top - low), 1e-6)
        axes.set_ylim(low, high if high - low > 1e-12 else low + 1.0)
    if not isinstance(chart.drawn[0].xs[0], str):
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=chart.x.label in ("step", "version")))
    axes.set_xlabel(chart.x.title, fontsize=9.5, color=LIGHT["muted"])
    axes.set_ylabel(chart.y.title, fontsize=9.5, color=LIGHT["muted"])


def _legend(axes: Axes, chart: Chart, share: float) -> int:
    """Draw names above the chart, so that they cover no data; return the number of rows they use."""
    drawn = chart.drawn
    if len(drawn) == 1 and drawn[0].kind in ("bars", "stacked"):
        return 0
    widest = max(min(len(series.name), MAX_NAME_CHARS) for series in drawn) + 6
    columns = max(1, min(len(drawn), int(LEGEND_CHARS * share) // widest))
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 0.995), ncols=columns, frameon=False, fontsize=9, borderaxespad=0.1,
        columnspacing=1.4, handlelength=2.2, labelcolor=LIGHT["ink"], labelspacing=0.25,
    )  # fmt: skip
    # space for the legend is reserved by the title's padding; a long name must not shrink the chart
    legend.set_in_layout(False)
    return math.ceil(len(drawn) / columns)


# ------------------------------------------------------------ strips


def draw_strips(axes: Axes, timeline: Timeline) -> None:
    """One strip per process, one under the other; waits are hatched."""
    from matplotlib.patches import Patch

    _dress(axes)
    axes.grid(visible=False, axis="y")
    if not timeline.strips:
        draw_chart(axes, Chart("timeline", "Timeline", Axis(""), Axis(""), missing=timeline.missing))
        return
    unit, per_unit = time_unit(timeline.length_s)
    for place, strip in enumerate(timeline.strips):
        xs = [x / per_unit for x in strip.xs_s]
        axes.axhspan(-place, -place + 0.72, color=LIGHT["c6"], alpha=0.1, linewidth=0)
        below = [float(-place)] * len(xs)
        for activity in timeline.activities:
            if activity not in strip.shares:
                continue
            tops = [low + 0.72 * share for low, share in zip(below, strip.shares[activity], strict=True)]
            style = _activity_style(activity)
            axes.fill_between(xs, below, tops, step="post", linewidth=0, **style)
            below = tops
    for rest in timeline.breaks:
        axes.axvline(rest.at_s / per_unit, color=LIGHT["ink"], linestyle="--", linewidth=1)
    axes.set_xlim(0, timeline.length_s / per_unit)
    axes.set_ylim(-len(timeline.strips) + 0.85, 0.85)
    ticks = [-place + 0.36 for place in range(len(timeline.strips))]
    axes.set_yticks(ticks, [_short(strip.name) for strip in timeline.strips], color=LIGHT["ink"])
    axes.set_xlabel(f"time since the start ({unit})", fontsize=9.5, color=LIGHT["muted"])
    patches = [Patch(label=literal(name), **_activity_style(name)) for name in timeline.activities]
    columns = min(len(patches), 10)
    rows = math.ceil(len(patches) / columns)
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(-0.003, 1.0), ncols=columns, frameon=False, fontsize=9,
        labelcolor=LIGHT["ink"], borderaxespad=0.2,
    )  # fmt: skip
    axes.set_title("Timeline: process activity (hatched: waiting; empty: nothing recorded)", loc="left", fontsize=11,
                   weight="bold", color=LIGHT["ink"], pad=8 + 15 * rows)  # fmt: skip


def _activity_style(activity: str) -> Mapping[str, Any]:
    shade = LIGHT[colours.activity_colour(activity)]
    if colours.is_wait(activity):
        return {"facecolor": shade + "4d", "edgecolor": shade, "hatch": "////"}
    return {"facecolor": shade}


def literal(words: str) -> str:
    """Text of a run as literal text: `$` does not start a formula, control characters are escaped."""
    return overview.text(words).replace("$", r"\$")
