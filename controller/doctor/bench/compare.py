"""Compares a measurement with the reference, taking the spread into account. Pure.

Measurements are made in measures.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from controller.doctor.bench.reference import FIGURES, Figure
from controller.doctor.finding import Finding

FAR = 0.5
"""A speed below this share of the reference, considering the spread, is a warning."""


@dataclass(frozen=True)
class Measure:
    """A measured quantity, and its format. `scale` divides the measured value (SI units) for display."""

    key: str
    name: str
    unit: str
    scale: float = 1.0
    is_time: bool = False
    """Whether a smaller value is faster."""
    advice: str = "check for other programs, power saving, or a limit of the virtual machine"


@dataclass(frozen=True)
class Ratio:
    """Speed as a multiple of the reference's; low and high are the extremes given both spreads."""

    median: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Text such as `1.3x the reference`, or that no difference can be determined."""
        text = f"{self.median:.2f}x" if self.median < 1 else f"{self.median:.1f}x"
        return (
            f"about the reference ({text}, within the spread)"
            if self.low <= 1 <= self.high
            else f"{text} the reference"
        )


def spread(values: Sequence[float]) -> Figure:
    """Median, lowest and highest of at least one value."""
    return Figure(statistics.median(values), min(values), max(values))


def ratio(here: Figure, there: Figure, *, is_time: bool) -> Ratio:
    """Speed of `here` as a multiple of `there`."""
    if is_time:
        return Ratio(there.median / here.median, there.low / here.high, there.high / here.low)
    return Ratio(here.median / there.median, here.low / there.high, here.high / there.low)


def judge(measure: Measure, values: Sequence[float], *, is_busy: bool) -> Finding:
    """The measurement, its spread and its ratio; a warning only if it is far below the reference and no other programs
    ran.
    """
    here, there = spread(values), FIGURES.get(measure.key)
    text = f"{_text(here.median / measure.scale)} {measure.unit}"
    text += f" ({_text(here.low / measure.scale)} to {_text(here.high / measure.scale)})"
    data = {"key": measure.key, "median": here.median, "low": here.low, "high": here.high, "repeats": len(values)}
    if there is None:
        return Finding("ok", text, "", data)
    found = ratio(here, there, is_time=measure.is_time)
    data |= {"ratio": found.median, "ratio_low": found.low, "ratio_high": found.high, "reference": there.median}
    is_far = found.high < FAR and not is_busy
    return Finding("warning" if is_far else "ok", f"{text}: {found.words}", measure.advice if is_far else "", data)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
