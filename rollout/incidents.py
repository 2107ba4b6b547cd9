"""Failures inside this process from which it recovered, and warnings of its workflow, until they are reported to the
controller.

A bounded list between the component that recovers (an engine's keeper) or warns and the worker, which sends it.
"""

from __future__ import annotations

from collections import deque

MAX_HELD = 100
"""Largest number of unreported failures, e.g. while not connected; of more only the newest are reported."""


class Incidents:
    """Failures as sentences, in order of time. Used from one event loop."""

    def __init__(self) -> None:
        self._held: deque[str] = deque(maxlen=MAX_HELD)
        self.count = 0
        """Number of all failures."""

    def add(self, text: str) -> None:
        """Add a failure, a recovery or a warning."""
        self._held.append(text)
        self.count += 1

    def take(self) -> list[str]:
        """Remove and return the unreported failures."""
        held = list(self._held)
        self._held.clear()
        return held
