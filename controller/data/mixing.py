"""The order in which rows of several sets are drawn: `data.mix`.

The order within a set is in table.py.

A position belongs to the set whose share of the draws so far is furthest below its weight (smooth weighted
round-robin). With weights w_k that sum to 1, each draw adds w_k to the credit of every set; the set with the largest
credit, the first of equal ones, is drawn and its credit decreases by 1. Credits sum to 0, so no set is ever a whole
round behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from controller.config.run_config import RunConfig
from controller.data.live import LiveOrder, LiveTable
from controller.data.table import DrawOrder, JoinedTable, Table


class Order(Protocol):
    """Maps positions to rows; a pure function of the configuration."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all sets."""

    @property
    def max_draws(self) -> int | None:
        """Number of positions; None: unlimited."""

    def row_index(self, draw: int) -> int:
        """The row of a position. Raises IndexError past `max_draws`."""


class MixedOrder:
    """See Order. Rows are numbered over all sets, one set after the other."""

    max_draws = None

    def __init__(self, sets: Sequence[DrawOrder], weights_at: Callable[[int], Sequence[float]]) -> None:
        """weights_at: weights of the sets at a position; above 0."""
        self._sets, self._weights_at = tuple(sets), weights_at
        self._credits = [0.0] * len(sets)
        self._num_drawn = [0] * len(sets)
        self._rows = array("Q")
        """Rows by position, computed as far as requested."""

    @property
    def num_rows(self) -> int:
        """See Order."""
        return sum(one.num_rows for one in self._sets)

    def row_index(self, draw: int) -> int:
        """See Order."""
        if draw < 0:
            raise IndexError(draw)
        while len(self._rows) <= draw:
            self._rows.append(self._next_row())
        return self._rows[draw]

    def _next_row(self) -> int:
        weights = self._weights_at(len(self._rows))
        total = sum(weights)
        for number, weight in enumerate(weights):
            self._credits[number] += weight / total
        chosen = max(range(len(self._sets)), key=lambda number: self._credits[number])
        self._credits[chosen] -= 1.0
        before = sum(one.num_rows for one in self._sets[:chosen])
        self._num_drawn[chosen] += 1
        return before + self._sets[chosen].row_index(self._num_drawn[chosen] - 1)


def order_of(config: RunConfig, table: Table) -> Order:
    """The order of a run. table: result of `load_training`."""
    if isinstance(table, LiveTable):
        return LiveOrder(table, config.data_seed, config.data.shuffle, config.data.train.new_share)
    if not isinstance(table, JoinedTable):
        return DrawOrder.of(config, table)
    seed, shuffle = config.data_seed, config.data.shuffle
    sets = [DrawOrder(len(part), seed + number, shuffle) for number, part in enumerate(table.parts)]
    return MixedOrder(sets, lambda draw: weights_at(config, draw))


def weights_at(config: RunConfig, draw: int) -> list[float]:
    """Weights of data.train (1) and of each set of data.mix at a position. A schedule ends at num_steps *
    groups_per_step groups, the minimum that the run needs.
    """
    progress = min(1.0, draw / max(1, config.num_groups - 1))
    ends = [(one.ratio, one.ratio if one.end_ratio is None else one.end_ratio) for one in config.data.mix]
    return [1.0, *(first + progress * (last - first) for first, last in ends)]
