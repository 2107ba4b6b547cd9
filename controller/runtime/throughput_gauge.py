"""Measures the sampling speed of each rollout worker from the counters of its heartbeats.

The use of speeds is in coordinator/routing.py.

Tokens and decode steps per second in which some slot was busy. A batch of three generates fewer tokens per second than
a full one on the same device, and a full one makes fewer steps. Both gauges therefore rise immediately and fall slowly:
they measure what the worker can do, not its present load. An answer cannot be faster than one token per step, however
idle its worker is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUSY_S = 1.0
"""Minimum busy time of one reading."""
FADE = 0.9
"""Weight of the previous value if a reading is lower."""
NEWS = 0.05
"""A smaller relative change is not reported."""


@dataclass
class _Reading:
    incarnation: str
    tokens: float
    steps: float
    busy_s: float
    tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    reported: tuple[float, float] = (0.0, 0.0)


class SpeedGauge:
    """Speeds by worker name."""

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}

    def read(self, name: str, incarnation: str, counters: Mapping[str, float]) -> tuple[float, float] | None:
        """The worker's tokens and steps per second if one has changed, else None.

        For an engine that does not count steps they are 0.
        """
        tokens, steps, busy_s = (counters.get(key, 0.0) for key in ("tokens", "steps", "busy_s"))
        last = self._readings.get(name)
        if last is None or last.incarnation != incarnation:
            self._readings[name] = _Reading(incarnation, tokens, steps, busy_s)
            return None
        span_s = busy_s - last.busy_s
        if span_s < BUSY_S:
            return None
        last.tokens_per_s = _faded(last.tokens_per_s, (tokens - last.tokens) / span_s)
        last.steps_per_s = _faded(last.steps_per_s, (steps - last.steps) / span_s)
        last.tokens, last.steps, last.busy_s = tokens, steps, busy_s
        found = (last.tokens_per_s, last.steps_per_s)
        is_news = any(abs(new - old) > NEWS * old for new, old in zip(found, last.reported, strict=True))
        if last.tokens_per_s <= 0 or not is_news:
            return None
        last.reported = found
        return found


def _faded(known: float, now: float) -> float:
    return max(now, FADE * known + (1 - FADE) * now)
