"""Accumulates seconds by activity of one process in bins of equal width, in memory that does not grow with the run.

Nested slices are supported. Files are read in timeline.py.

A grid starts with narrow bins; whenever it has too many bins, their width is doubled and neighbours are added up. Bins
are numbered from the epoch and their widths are a base times a power of two, so that the grids of two processes differ
by whole factors, and a run that was stopped for a weekend uses no bins for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BASE_WIDTH_S = 1 / 128
MAX_BINS = 4096
NESTED_MEMORY = 64
"""Number of outermost slices kept to find the ones that a later slice encloses; a lane has at most two levels."""


@dataclass
class ActivityGrid:
    """Seconds of one process. `seconds[activity][bin]`, where `bin` begins at `bin * width_s` since the epoch."""

    doublings: int = 0
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    first_s: float = math.inf
    last_s: float = -math.inf
    _occupied: set[int] = field(default_factory=set)

    @property
    def width_s(self) -> float:
        """Length of a bin: BASE_WIDTH_S * 2 ** doublings."""
        return BASE_WIDTH_S * float(1 << self.doublings)

    @property
    def bins(self) -> set[int]:
        """Bins with recorded activity."""
        return self._occupied

    def add(self, activity: str, start_s: float, end_s: float, weight: float = 1.0) -> None:
        """Add `weight` seconds of `activity` per second between the two times (-1 subtracts an enclosed slice)."""
        if not end_s > start_s:
            return
        self.first_s, self.last_s = min(self.first_s, start_s), max(self.last_s, end_s)
        while (end_s - start_s) / self.width_s > MAX_BINS:
            self._double()
        width_s = self.width_s
        first, last = math.floor(start_s / width_s), math.floor(end_s / width_s)
        mine = self.seconds.setdefault(activity, {})
        for index in range(first, last + 1):
            part_s = min(end_s, (index + 1) * width_s) - max(start_s, index * width_s)
            if part_s > 0:
                mine[index] = mine.get(index, 0.0) + weight * part_s
                self._occupied.add(index)
        while len(self._occupied) > MAX_BINS:
            self._double()

    def folded(self, doublings: int) -> dict[str, dict[int, float]]:
        """Return the seconds in wider bins. `doublings` is at least the grid's own."""
        shift = doublings - self.doublings
        assert shift >= 0, "a grid cannot be refined"
        return {activity: _fold(bins, shift) for activity, bins in self.seconds.items()}

    def _double(self) -> None:
        self.doublings += 1
        self.seconds = {activity: _fold(bins, 1) for activity, bins in self.seconds.items()}
        self._occupied = {index >> 1 for index in self._occupied}


def _fold(bins: dict[int, float], shift: int) -> dict[int, float]:
    wide: dict[int, float] = {}
    for index, seconds in bins.items():
        wide[index >> shift] = wide.get(index >> shift, 0.0) + seconds
    return wide


class NestedLane:
    """Slices of one lane in the order in which they ended: an outer slice comes after the slices inside it.

    A second is counted for the innermost slice around it (`update` inside `forward_backward` is update).
    """

    def __init__(self, grid: ActivityGrid) -> None:
        self._grid = grid
        self._recent: deque[tuple[float, float]] = deque(maxlen=NESTED_MEMORY)

    def add(self, activity: str, start_s: float, end_s: float) -> None:
        """Add one slice."""
        self._grid.add(activity, start_s, end_s)
        while self._recent and self._recent[-1][0] >= start_s:
            inner_start_s, inner_end_s = self._recent.pop()
            self._grid.add(activity, inner_start_s, min(inner_end_s, end_s), weight=-1.0)
        self._recent.append((start_s, end_s))


def widest(grids: Sequence[ActivityGrid]) -> int:
    """The number of doublings that all `grids` can be folded to."""
    return max((grid.doublings for grid in grids), default=0)
