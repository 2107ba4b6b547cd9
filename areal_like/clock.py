"""Where time comes from, so that tests and the simulator can bring their own.

Owns: the `Clock` protocol, the machine's clock, a virtual one. Refuses: sleeping and timers (the event loop's).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one that never goes back, one that names a moment in the world."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back. For durations and deadlines."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch. For records that people and other processes read."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """`time.time()`."""
        return time.time()


class VirtualClock:
    """A clock that moves only when asked to."""

    def __init__(self, *, start_s: float = 0.0, epoch_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._wall_offset_s = epoch_s - start_s

    def monotonic_s(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def wall_s(self) -> float:
        """Virtual seconds since the (virtual) epoch."""
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises ValueError when asked to go back."""
        if not seconds >= 0:
            raise ValueError(f"time does not go back (advance by {seconds} s)")
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Jump to the monotonic reading `now_s`. Raises ValueError when that is in the past."""
        self.advance(now_s - self._now_s)
