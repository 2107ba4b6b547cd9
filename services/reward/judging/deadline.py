"""The wall clock of one judged program.

Owns: when it started, the alarm that ends the judge. Refuses: the program's own time (sandbox/run), which ends
a program long before.
"""

from __future__ import annotations

import math
import signal
import time

ALARM_ROOM_S = 1.0
"""Beyond its total time a judge is ended by the kernel: only a test that computes for ever with what a program answered
brings it there."""


class Deadline:
    """Runs from the first `start`: a sandbox that is slow to come up costs no program its time."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self.until_s = math.inf
        """On the monotonic clock."""

    def start(self) -> None:
        """The program can run now. Later calls change nothing."""
        if self.until_s == math.inf:
            self.until_s = time.monotonic() + self._total_s
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._total_s + ALARM_ROOM_S)

    @property
    def is_over(self) -> bool:
        """No further test may begin."""
        return time.monotonic() > self.until_s
