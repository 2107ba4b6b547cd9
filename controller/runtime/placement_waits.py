"""Tracks processes that wait for a placement on the cluster, with the deadline `launch.ray.node_wait_s`. Pure.

Placements are in launch/cluster; the consequences are in supervisor.py.

A placement may be missing because a node failed and no other has the resources. This is not a failed start and does not
count as a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

TELL_AFTER_S = 10.0
"""Waits longer than this are reported. Ray needs seconds for every placement, more on a busy machine."""


@dataclass
class _Wait:
    since_s: float
    is_reported: bool = False


class PlaceWaits:
    """Waits of processes. Call `look` regularly for each process that runs or waits."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[str, _Wait] = {}
        self._news: list[str] = []

    @property
    def names(self) -> list[str]:
        """Processes that wait."""
        return list(self._waits)

    def look(self, name: str, awaited: str, now_s: float) -> str:
        """Update what `name` waits for (empty: nothing). Returns the reason once it has waited too long."""
        if not awaited:
            if (wait := self._waits.pop(name, None)) is not None and wait.is_reported:
                self._news.append(f"{name} is placed")
            return ""
        wait = self._waits.setdefault(name, _Wait(now_s))
        if now_s - wait.since_s > self._limit_s:
            self.forget(name)
            return f"waited {self._limit_s:g} s for {awaited} (launch.ray.node_wait_s)"
        if now_s - wait.since_s > TELL_AFTER_S and not wait.is_reported:
            wait.is_reported = True
            self._news.append(f"{name} waits for {awaited}, at most {self._limit_s:g} s (launch.ray.node_wait_s)")
        return ""

    def forget(self, name: str) -> None:
        """Remove a process that has exited."""
        self._waits.pop(name, None)

    def take_news(self) -> list[str]:
        """Messages since the last call."""
        news, self._news = self._news, []
        return news
