"""Processes that wait for a place on the cluster: since when, what for, and when it has been too long. Pure.

Owns: the deadline `launch.ray.node_wait_s`, and when such a wait is worth a word. Refuses: places (launch/cluster),
what becomes of a process that gets none (supervisor.py).

A place may be missing because a node died and no other has room. That is no failed start: it costs no restart.
"""

from __future__ import annotations

from dataclasses import dataclass

TELL_AFTER_S = 10.0
"""Ray needs seconds for every place, more on a busy machine; a longer wait is said."""


@dataclass
class _Wait:
    since_s: float
    is_reported: bool = False


class PlaceWaits:
    """`look` again and again at each process that runs or is on its way."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[str, _Wait] = {}
        self._news: list[str] = []

    @property
    def names(self) -> list[str]:
        """Who waits."""
        return list(self._waits)

    def look(self, name: str, awaited: str, now_s: float) -> str:
        """What `name` waits for (empty: nothing). Returns why it is given up, once it has waited for too long."""
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
        """It has ended."""
        self._waits.pop(name, None)

    def take_news(self) -> list[str]:
        """What is worth a word since the last call."""
        news, self._news = self._news, []
        return news
