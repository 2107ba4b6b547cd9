"""Draws the states of a process, of which one is active at a time, as the main lane of its timeline.

Changes of state become slices that never overlap. Exact sums of time are in counters; the lane is only a picture.

The number of slices is bounded: a state shorter than `shortest_s` has no slice and is merged into the one that it
interrupts. This limit grows with the age of the process (its age divided by SLICES_PER_AGE): a lane has about 5000
slices at the age of 100 s, and 5000 more each time the age grows by a factor e, however often states change.
"""

from __future__ import annotations

from collections.abc import Collection

from areal_like.trace import MAIN_LANE, Tracer

SHORTEST_S = 0.02
SLICES_PER_AGE = 5000


class StateLane:
    """Call `enter` at every change and `close` at the end. States in `kept` are drawn even if they are short."""

    def __init__(self, tracer: Tracer, first: str, *, kept: Collection[str] = (), lane: str = MAIN_LANE) -> None:
        self._tracer, self._kept, self._lane = tracer, kept, lane
        self._born_s = tracer.now_s()
        self._open = (first, self._born_s)
        """The next slice to write."""
        self._next: tuple[str, float] | None = None
        """The state after it, if it lasts long enough."""

    @property
    def state(self) -> str:
        """The current state."""
        return (self._next or self._open)[0]

    def enter(self, name: str, at_s: float | None = None) -> None:
        """The process does `name` from `at_s` on (wall-clock seconds of `Tracer.now_s`; None: from now)."""
        at_s = self._tracer.now_s() if at_s is None else at_s
        if self._next is None:
            if name != self._open[0]:
                self._next = (name, max(at_s, self._open[1]))
            return
        candidate, since_s = self._next
        at_s = max(at_s, since_s)
        shortest_s = max(SHORTEST_S, (at_s - self._born_s) / SLICES_PER_AGE)
        if at_s - since_s < shortest_s and candidate not in self._kept:
            if name == self._open[0]:
                self._next = None
            else:
                self._next = (name, at_s if name in self._kept else since_s)
        elif name != candidate:
            self._write(since_s)
            self._open, self._next = (candidate, since_s), (name, at_s)

    def between(self, name: str, start_s: float, end_s: float) -> None:
        """The process did `name` from `start_s` to `end_s`, and then returned to its previous state."""
        before = self.state
        self.enter(name, start_s)
        self.enter(before, end_s)

    def close(self) -> None:
        """Write the remaining slices."""
        if self._next is not None:
            self._write(self._next[1])
            self._open, self._next = self._next, None
        self._write(self._tracer.now_s())

    def _write(self, end_s: float) -> None:
        name, start_s = self._open
        if end_s > start_s:
            self._tracer.complete(name, start_s, end_s, self._lane)
