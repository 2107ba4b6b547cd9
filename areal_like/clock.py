"""The clock protocol, the system clock and a virtual clock for tests and the simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time and of wall-clock time."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never decreases. Used for durations and deadlines."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch. Used in records that people and other processes read."""
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
    """A clock that advances only on request."""

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
        """Advance by `seconds`. Raises ValueError for a negative number."""
        if not seconds >= 0:
            raise ValueError(f"the clock cannot go back (advance by {seconds} s)")
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Jump to the monotonic reading `now_s`. Raises ValueError when that is in the past."""
        self.advance(now_s - self._now_s)
