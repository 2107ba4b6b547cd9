"""Counts of what the service did, for heartbeats, logs and reports.

Owns: verdict counts, seconds and latency percentiles, in all and per scorer. Refuses: deciding anything by them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from areal_like.verdict import Verdict

WINDOW = 512
"""Latest latencies that the percentiles look at."""
KINDS = ("scored", "timed_out", "crashed", "invalid")


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; 0.0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Tally:
    """All counters are monotonic; percentiles are over the last WINDOW answers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._score_s: deque[float] = deque(maxlen=WINDOW)
        self._queue_s: deque[float] = deque(maxlen=WINDOW)
        self._scorer_s: dict[str, deque[float]] = {}

    def count(self, name: str) -> None:
        """Add one to a counter."""
        self.counts[name] += 1

    def add_attempt(self, kind: str, failed_in: str, scorer_s: dict[str, float]) -> None:
        """One attempt at one answer: seconds per scorer, and whose fault a failure was."""
        for name, seconds in scorer_s.items():
            self.counts[f"scorer.{name}.answers"] += 1
            self._seconds[f"scorer.{name}.busy_s"] += seconds
            self._scorer_s.setdefault(name, deque(maxlen=WINDOW)).append(seconds)
        if failed_in:
            self.counts[f"scorer.{failed_in}.{kind}"] += 1

    def add_verdict(self, verdict: Verdict, queue_s: float) -> None:
        """One finished request."""
        self.counts[verdict.kind] += 1
        self._seconds["busy_s"] += verdict.wall_s
        self._score_s.append(verdict.wall_s)
        self._queue_s.append(queue_s)

    def counters(self) -> dict[str, float]:
        """Everything, flat, in counts and seconds."""
        flat: dict[str, float] = {**self.counts, **self._seconds}
        for name, window in (("score", self._score_s), ("queue", self._queue_s)):
            flat[f"{name}_p50_s"] = percentile(list(window), 0.5)
            flat[f"{name}_p95_s"] = percentile(list(window), 0.95)
        for name, window in self._scorer_s.items():
            flat[f"scorer.{name}.p50_s"] = percentile(list(window), 0.5)
            flat[f"scorer.{name}.p95_s"] = percentile(list(window), 0.95)
        return flat
