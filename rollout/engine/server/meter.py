"""Counters of an engine: tokens, and how its time was spent."""

from __future__ import annotations

import time

from rollout.engine.server.answer import MetaInfo


class Meter:
    """Counts tokens and time. Time is `paused` during a pause, else `busy` while anything streams, else `idle`."""

    def __init__(self) -> None:
        self._counts = {"tokens": 0.0, "prefill_tokens": 0.0, "cached_tokens": 0.0}
        self._spent_s = {"busy_s": 0.0, "idle_s": 0.0, "paused_s": 0.0}
        self._since_s = self._moved_s = time.monotonic()
        self._is_busy = self._is_paused = False

    @property
    def paused_s(self) -> float:
        """Seconds paused so far."""
        self._settle()
        return self._spent_s["paused_s"]

    def add_tokens(self, num_tokens: int, first: MetaInfo | None) -> None:
        """Count new tokens; `first`: metadata of the first event of an attempt that has the counts of its prompt."""
        if num_tokens:
            self._moved_s = time.monotonic()
        self._counts["tokens"] += num_tokens
        if first is not None:
            self._counts["prefill_tokens"] += first.prompt_tokens - first.cached_tokens
            self._counts["cached_tokens"] += first.cached_tokens

    def set_busy(self, is_busy: bool) -> None:
        """Record whether anything streams."""
        if is_busy != self._is_busy:
            self._settle()
            self._is_busy, self._moved_s = is_busy, time.monotonic()

    def set_paused(self, is_paused: bool) -> None:
        """Record whether generation is paused."""
        if is_paused != self._is_paused:
            self._settle()
            self._is_paused, self._moved_s = is_paused, time.monotonic()

    def stalled_s(self) -> float:
        """Seconds for which there has been work, no pause, and no token."""
        return time.monotonic() - self._moved_s if self._is_busy and not self._is_paused else 0.0

    def counters(self) -> dict[str, float]:
        """All counts, with seconds up to now."""
        self._settle()
        return {**self._counts, **self._spent_s}

    def _settle(self) -> None:
        now_s = time.monotonic()
        spent = "paused_s" if self._is_paused else "busy_s" if self._is_busy else "idle_s"
        self._spent_s[spent] += now_s - self._since_s
        self._since_s = now_s
