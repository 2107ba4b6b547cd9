"""An environment process that says what a test wants."""

from __future__ import annotations

from typing import Any

from services.environment.marker import NOBODY, Mark

NOW_S, MB = 1000.0, 1 << 20


class FakeHost:
    """Never ran. `mark`: what its marker says, where it is not the usual."""

    def __init__(self, pid: int = 7, num_episodes: int = 1, **mark: Any) -> None:
        self.pid, self.culprit, self.culprit_kind, self.killed_because = pid, NOBODY, "crashed", ""
        self.episodes, self.waiting = set(range(num_episodes)), {1}
        self.makes_room = False
        self.num_begun, self.is_retired, self.moved_s = 1, False, NOW_S
        facts = {"episode": NOBODY, "since_s": NOW_S, "calls": 1, "used_bytes": 0, "heaviest": 0, "heaviest_bytes": 0}
        self.mark = Mark(**{**facts, **mark})

        self.starved = False

    def look(self) -> Mark:
        return self.mark

    def is_starved(self, mark: Mark, limit_s: float) -> bool:
        return self.starved
