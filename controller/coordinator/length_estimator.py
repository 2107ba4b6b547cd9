"""How many tokens an answer still has to go, judged by the answers that ended lately.

Owns: `LengthStatistics`, a bounded sample of lengths. Refuses: who holds which answer (run_state.py), choosing
(routing.py).

E[length - t | length > t] over the last lengths: with a long tail an answer that is long already has *more* to go than
a fresh one. Short answers end first, so right after the start the estimate is low; it only compares workers.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque

WINDOW = 1024
"""Lengths that are remembered: some steps' worth, so that a policy that learns to answer longer is followed."""
MIN_KNOWN = 8
"""Fewer lengths than this say nothing: half of what is allowed is assumed."""
REFRESH_EVERY = 32
"""New lengths between two sortings: the cost per sample stays at microseconds."""


class LengthStatistics:
    """Lengths in sampled tokens. `max_new_tokens` bounds every answer."""

    def __init__(self, max_new_tokens: int) -> None:
        self._max = max_new_tokens
        self._last: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []
        self._sum_from: list[int] = [0]
        """Sum of the sorted lengths from each place on."""
        self._num_fresh = 0

    def add(self, num_tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._last.append(num_tokens)
        self._num_fresh += 1
        if self._num_fresh >= REFRESH_EVERY or len(self._sorted) < REFRESH_EVERY:
            self._num_fresh = 0
            self._sorted = sorted(self._last)
            self._sum_from = [*itertools.accumulate(reversed(self._sorted), initial=0)][::-1]

    @property
    def mean(self) -> float:
        """Expected length of an answer not begun."""
        return self.expected_left(0)

    def expected_left(self, num_tokens: int) -> float:
        """Expected further tokens of an answer that has `num_tokens`; at least 1: it has not ended."""
        most = max(1, self._max - num_tokens)
        if len(self._sorted) < MIN_KNOWN:
            return max(1.0, most / 2)
        place = bisect_right(self._sorted, num_tokens)
        num_longer = len(self._sorted) - place
        if not num_longer:  # longer than all that were seen: as much again as the usual answer has
            return min(most, self._sum_from[0] / len(self._sorted))
        return min(most, max(1.0, self._sum_from[place] / num_longer - num_tokens))
