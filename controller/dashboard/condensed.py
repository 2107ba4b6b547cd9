"""Steps and pulses of a run for its curves, in memory that does not grow with the run.

Merges steps into bins as they arrive, and thins pulses. Curves are in report/run_charts.py. A curve of 5,000 points on
a screen of 400 is drawn from bins anyway; with incremental merging an update has the same cost at any step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.report.charts import number

MAX_BINS = 400
"""More points than a chart of half the page width can show."""
MAX_LIST = 64
"""Values kept of a list (the staleness of each group) in a bin: its shares are accurate to 1/64."""
_LOWEST = ("ess", "explained_variance")
"""Fields whose worst value is the lowest: the report also draws their minimum."""

Row = dict[str, Any]


class Condensed:
    """Rows of steps in ascending order. A bin has the last step and time of its rows, and their means or extremes."""

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self._max_bins = max_bins
        self.per_bin = 1
        self._bins: list[Row] = []
        self._counts: list[int] = []

    @property
    def rows(self) -> Sequence[Row]:
        """The bins as rows of steps."""
        return self._bins

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one step."""
        if self._bins and self._counts[-1] < self.per_bin:
            self._bins[-1] = merged(self._bins[-1], self._counts[-1], row, 1)
            self._counts[-1] += 1
            return
        if len(self._bins) >= self._max_bins:
            self._halve()
            self.add(row)
            return
        self._bins.append(dict(row))
        self._counts.append(1)

    def _halve(self) -> None:
        self.per_bin *= 2
        bins, counts = self._bins, self._counts
        pairs = range(0, len(bins) - 1, 2)
        odd = len(bins) % 2
        self._bins = [merged(bins[at], counts[at], bins[at + 1], counts[at + 1]) for at in pairs] + bins[
            len(bins) - odd :
        ]
        self._counts = [counts[at] + counts[at + 1] for at in pairs] + counts[len(counts) - odd :]


def merged(one: Mapping[str, Any], num_one: int, other: Mapping[str, Any], num_other: int) -> Row:
    """Merge two rows: means are weighted by the number of steps of each, extremes are kept."""
    row: Row = {**one, **other}
    for key in ("step", "time_s", "wall_s"):
        if key in other:
            row[key] = other[key]
    for key in one.keys() & other.keys() - {"step", "time_s", "wall_s", "kind"}:
        a, b = one[key], other[key]
        if isinstance(a, list) and isinstance(b, list):
            row[key] = _spread(a, num_one, b, num_other)
            continue
        first, second = number(a), number(b)
        if first is None or second is None:
            row[key] = a if second is None and first is not None else b
        elif key.endswith("_max"):
            row[key] = max(first, second)
        elif key in _LOWEST:
            row[key] = min(first, second)
        else:
            row[key] = (first * num_one + second * num_other) / (num_one + num_other)
    return row


def _spread(a: list[Any], num_a: int, b: list[Any], num_b: int) -> list[Any]:
    """Both lists, or quantiles of each in proportion to its number of steps."""
    if len(a) + len(b) <= MAX_LIST:
        return a + b
    places = max(1, min(MAX_LIST - 1, round(MAX_LIST * num_a / (num_a + num_b))))
    return [*_quantiles(a, places), *_quantiles(b, MAX_LIST - places)]


def _quantiles(values: list[Any], count: int) -> list[Any]:
    """`count` values at equal distances in sorted order; values that are not numbers are ignored."""
    known = sorted(value for value in values if number(value) is not None)
    return [known[int((place + 0.5) * len(known) / count)] for place in range(count)] if known else []


class ThinnedPulses:
    """Every n-th pulse and the newest. Their counters are cumulative, so no activity between two pulses is lost."""

    def __init__(self, max_pulses: int = MAX_BINS) -> None:
        self._max_pulses = max_pulses
        self._stride, self._seen = 1, 0
        self._kept: list[Row] = []
        self._newest: Row | None = None

    def add(self, pulse: Row) -> None:
        """Add one pulse."""
        if self._seen % self._stride == 0:
            self._kept.append(pulse)
            if len(self._kept) >= 2 * self._max_pulses:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self._seen += 1
        self._newest = pulse

    @property
    def rows(self) -> list[Row]:
        """The kept pulses, in order."""
        if self._newest is None or self._kept[-1] is self._newest:
            return list(self._kept)
        return [*self._kept, self._newest]
