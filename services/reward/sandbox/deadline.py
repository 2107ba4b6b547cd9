"""The time limit of one judged program, over all its runs and its tests.

Own time, and the limit of a single run, are measured in run.py.
"""

from __future__ import annotations

import math
import time

TESTS_ROOM_S = 1.0
"""Time that tests may take in addition to a program's total time, for computing with its answers."""
WALL_FACTOR, WALL_ROOM_S = 10.0, 600.0


class Deadline:
    """`spent_s` is own time: it does not grow while the program waits for a processor (run.py).

    The wall-clock time is bounded too, from the first `start`, but far above: a program that reaches that bound had no
    processor for most of the time, so no verdict is given. A reward service has a shorter bound, `reward.timeout_s`.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        """Own seconds for all runs of the program together."""
        self.wall_s = WALL_FACTOR * total_s + WALL_ROOM_S
        self.spent_s = 0.0
        self.until_s = math.inf
        """End of the wall-clock time, on the monotonic clock."""

    def start(self) -> None:
        """Start the clock once the program can run, so that a slow start of the sandbox does not count. Later calls
        have no effect."""
        if self.until_s == math.inf:
            self.until_s = time.monotonic() + self.wall_s

    def left_s(self, room_s: float = 0.0) -> float:
        """Own seconds left for a run with `room_s` additional seconds."""
        return self.total_s + room_s - self.spent_s

    @property
    def is_over(self) -> bool:
        """Whether no further test may begin."""
        return self.left_s() < 0.0
