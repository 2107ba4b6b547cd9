"""Means with intervals, and spreads of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14, 19: 2.09}


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval (Student's t); None: one value has no interval."""
    if len(values) < 2:
        return statistics.fmean(values), None
    degrees = len(values) - 1
    quantile = STUDENT_95.get(degrees) or min(t for d, t in STUDENT_95.items() if d <= degrees)
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def half_words(half: float | None, form: str) -> str:
    """A half width as text; `-` if there is none."""
    return "-" if half is None else format(half, form)


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Mean, lowest and highest."""
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}


def median_spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
