"""What broke inside this process and was recovered here, until it has been reported to the controller.

Owns: a bounded list between the component that recovers (an engine's keeper) and the worker, which sends it. Refuses:
deciding what follows.
"""

from __future__ import annotations

from collections import deque

MAX_HELD = 100
"""Not reported yet, e.g. while nobody is connected; of more only the newest are reported."""


class Incidents:
    """Sentences in the order they happened. One event loop."""

    def __init__(self) -> None:
        self._held: deque[str] = deque(maxlen=MAX_HELD)
        self.count = 0
        """Of all that ever happened."""

    def add(self, text: str) -> None:
        """Something broke, or was recovered."""
        self._held.append(text)
        self.count += 1

    def take(self) -> list[str]:
        """What has not been reported yet."""
        held = list(self._held)
        self._held.clear()
        return held
