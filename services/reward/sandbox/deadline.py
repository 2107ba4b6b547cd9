"""The time of one judged program, over all runs of it and of its tests.

Owns: the own time that all runs spent together, the bound on the wall. Refuses: measuring own time, and the limit of a
single run (run).
"""

from __future__ import annotations

import math
import time

TESTS_ROOM_S = 1.0
"""Tests may take so much longer than a program's total time; only computing with its answers brings them there."""
WALL_FACTOR, WALL_ROOM_S = 10.0, 600.0


class Deadline:
    """`spent_s` is own time: it does not grow while the machine keeps the program from running (run).

    The wall is bounded too, from the first `start`, but far beyond: who reaches that bound had no processor for most of
    the time, so it is no verdict on a program. A reward service has a shorter one of its own, `reward.timeout_s`.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        """Own seconds for all runs of the program together."""
        self.wall_s = WALL_FACTOR * total_s + WALL_ROOM_S
        self.spent_s = 0.0
        self.until_s = math.inf
        """On the monotonic clock."""

    def start(self) -> None:
        """The program can run now: a sandbox that is slow to come up costs no time. Later calls change nothing."""
        if self.until_s == math.inf:
            self.until_s = time.monotonic() + self.wall_s

    def left_s(self, room_s: float = 0.0) -> float:
        """Own seconds left for a run that has `room_s` more than the others."""
        return self.total_s + room_s - self.spent_s

    @property
    def is_over(self) -> bool:
        """No further test may begin."""
        return self.left_s() < 0.0
