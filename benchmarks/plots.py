"""Draws panels: bars over named cases, or lines over a number.

panels.py chooses the panels of a result; style and file format are in pictures.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pictures

BAR_IN = 0.19
"""Height of one bar, inches."""
FRAME_IN = 0.75
"""Height of a panel's title and axis, inches."""
LEGEND_IN = 0.22
"""Height of a line of its legend, inches."""
CHARACTER_IN = 0.095
"""Width of one character of a title, inches."""


@dataclass(frozen=True)
class Series:
    """One value per place (None: not measured), and optionally its range (lowest, highest)."""

    name: str
    values: Sequence[float | None]
    spreads: Sequence[tuple[float, float] | None] = ()

    def spread(self, index: int) -> tuple[float, float] | None:
        """The range of the value at `index`."""
        return self.spreads[index] if self.spreads else None


@dataclass(frozen=True)
class Panel:
    """Bars over `places` from top to bottom, or lines if these are numbers. mark: a value to compare with."""

    title: str
    places: Sequence[str] | Sequence[float]
    series: Sequence[Series]
    mark: float | None = None
    is_logarithmic: bool = False
    axis: str = ""
    """Label of the horizontal axis of lines."""

    @property
    def is_lines(self) -> bool:
        """Whether places are numbers."""
        return bool(self.places) and not isinstance(self.places[0], str)


def draw(name: str, panels: Sequence[Panel], source: Path, picture: Path) -> Path:
    """Draw one picture with all panels of a result file, one below the other."""
    made, axes = pictures.figure(len(panels), heights_in=[_height_in(panel) for panel in panels])
    left_in = max(_labels_in(panel) for panel in panels)  # their axes are aligned
    for axis, panel in zip(axes, panels, strict=True):
        (_lines if panel.is_lines else _bars)(axis, panel)
        _name(axis, panel, left_in)
    described = "; ".join(_described(panel) for panel in panels)
    title = f"{name.replace('_', ' ')}: {', '.join(panel.title for panel in panels)}"
    return pictures.save(made, picture, title=title, description=described, source=source)


def _height_in(panel: Panel) -> float:
    num_bars = len(panel.places) * len(panel.series) + len(panel.places) // 2
    legend_in = LEGEND_IN * math.ceil(len(panel.series) / _columns(panel)) if len(panel.series) > 1 else 0.0
    return (pictures.PANEL_IN if panel.is_lines else FRAME_IN + BAR_IN * num_bars) + legend_in


def _labels_in(panel: Panel) -> float:
    """Width of the labels left of the axis, inches."""
    return (
        0.4
        if panel.is_lines
        else 0.15 + 0.8 * CHARACTER_IN * max((len(str(place)) for place in panel.places), default=0)
    )


def _columns(panel: Panel) -> int:
    """Number of columns of the legend."""
    longest = max(len(series.name) for series in panel.series)
    return max(1, int((pictures.WIDTH_IN - _labels_in(panel)) / (CHARACTER_IN * (longest + 5))))


def _bars(axis: Any, panel: Panel) -> None:
    """Draw horizontal bars, so that names stay legible, with whiskers from the lowest to the highest value."""
    deep = 0.8 / len(panel.series)
    for number, series in enumerate(panel.series):
        colour = pictures.SERIES[number % len(pictures.SERIES)]
        known = {index: value for index, value in enumerate(series.values) if value is not None}
        at = {index: index + (number - (len(panel.series) - 1) / 2) * deep for index in known}
        axis.barh(list(at.values()), list(known.values()), height=deep * 0.9, color=colour, label=series.name)
        for index in known:
            if (spread := series.spread(index)) is not None:
                axis.plot(spread, [at[index]] * 2, color=pictures.INK, linewidth=1.1)
    axis.set_yticks(range(len(panel.places)), [str(place) for place in panel.places])
    axis.set_ylim(len(panel.places) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x", linewidth=0.6)
    if panel.mark is not None:
        axis.axvline(panel.mark, color=pictures.INK, linewidth=0.9, linestyle="--")
    if panel.is_logarithmic:
        axis.set_xscale("log")


def _lines(axis: Any, panel: Panel) -> None:
    places = [float(place) for place in panel.places]
    for number, series in enumerate(panel.series):
        style = pictures.line_style(number)
        known = [index for index, value in enumerate(series.values) if value is not None]
        axis.plot([places[index] for index in known], [series.values[index] for index in known], markersize=5,
                  linewidth=1.4, label=series.name, **style)  # fmt: skip
        for index in known:
            if (spread := series.spread(index)) is not None:
                axis.plot([places[index]] * 2, spread, color=style["color"], linewidth=1)
    if max(places) >= 16 * min(place for place in places if place > 0):
        axis.set_xscale("log")
        axis.set_xticks(places, [f"{place:g}" for place in places])
        axis.minorticks_off()
    if panel.is_logarithmic:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=min(0.0, axis.dataLim.y0))
    if panel.mark is not None:
        axis.axhline(panel.mark, color=pictures.INK, linewidth=0.9, linestyle="--")
    axis.set_xlabel(panel.axis)


def _name(axis: Any, panel: Panel, left_in: float) -> None:
    axis.set_title("\n".join(textwrap.wrap(panel.title, int((pictures.WIDTH_IN - left_in) / CHARACTER_IN))))
    if len(panel.series) > 1:  # below the axis, where it hides nothing
        below_in = 0.55 if panel.is_lines else 0.3
        axis.legend(loc="upper left", bbox_to_anchor=(0, -below_in / _height_in(panel)), ncols=_columns(panel),
                    handlelength=1.2)  # fmt: skip


def _described(panel: Panel) -> str:
    parts = [
        f"{place}{', ' + series.name if len(panel.series) > 1 else ''} {value:.4g}"
        for index, place in enumerate(panel.places)
        for series in panel.series
        if (value := series.values[index]) is not None
    ]
    return f"{panel.title}: {', '.join(parts)}"
