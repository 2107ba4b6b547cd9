"""The wall clock of one judged program.

Owns: when it started. Refuses: the program's own time (sandbox/run), which ends a program long before.
"""

from __future__ import annotations

import math
import time

TESTS_ROOM_S = 1.0
"""Tests may take so much longer than a program's total time; only computing with its answers brings them there."""


class Deadline:
    """Runs from the first `start`: a sandbox that is slow to come up costs no program its time."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self.until_s = math.inf
        """On the monotonic clock."""

    def start(self) -> None:
        """The program can run now. Later calls change nothing."""
        if self.until_s == math.inf:
            self.until_s = time.monotonic() + self.total_s

    @property
    def is_over(self) -> bool:
        """No further test may begin."""
        return time.monotonic() > self.until_s
