"""Estimates the remaining tokens of an answer from the lengths of recent answers.

E[length - t | length > t] over the recent lengths: with a long tail, an answer that is already long has *more*
remaining tokens than a new one. Short answers end first, so right after the start the estimate is low; it is only used
to compare workers.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque

WINDOW = 1024
"""Number of lengths kept: those of some steps, so that the estimate follows a policy whose answers become longer."""
MIN_KNOWN = 8
"""With fewer lengths than this, half of the maximum length is assumed."""
REFRESH_EVERY = 32
"""New lengths between two sorts, so that the cost per sample stays at microseconds."""


class LengthStatistics:
    """Lengths in sampled tokens. `max_new_tokens` bounds every answer."""

    def __init__(self, max_new_tokens: int) -> None:
        self._max = max_new_tokens
        self._last: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []
        self._sum_from: list[int] = [0]
        """Sum of the sorted lengths from each position on."""
        self._num_fresh = 0

    def add(self, num_tokens: int) -> None:
        """Record the length of a finished answer."""
        self._last.append(num_tokens)
        self._num_fresh += 1
        if self._num_fresh >= REFRESH_EVERY or len(self._sorted) < REFRESH_EVERY:
            self._num_fresh = 0
            self._sorted = sorted(self._last)
            self._sum_from = [*itertools.accumulate(reversed(self._sorted), initial=0)][::-1]

    @property
    def mean(self) -> float:
        """Expected length of an answer that has not started."""
        return self.expected_left(0)

    def expected_left(self, num_tokens: int) -> float:
        """Expected further tokens of an answer that has `num_tokens`; at least 1: it has not ended."""
        most = max(1, self._max - num_tokens)
        if len(self._sorted) < MIN_KNOWN:
            return max(1.0, most / 2)
        place = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - place
        if not num_longer:  # longer than all recorded answers: the mean length is assumed to remain
            return min(most, self._sum_from[0] / len(self._sorted))
        return min(most, max(1.0, self._sum_from[place] / num_longer - num_tokens))
