"""Counters of the service for heartbeats, logs and reports: verdicts, seconds and latency percentiles, total and per
scorer.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection

from areal_like.verdict import Verdict

WINDOW = 512
"""Number of latest latencies for the percentiles."""
KINDS = ("scored", "timed_out", "crashed", "invalid")


SHARES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}


def percentiles(values: Collection[float]) -> dict[str, float]:
    """Nearest-rank percentiles by the names of SHARES; 0.0 without values."""
    ordered = sorted(values) or [0.0]
    return {name: ordered[int(share * len(ordered))] for name, share in SHARES.items()}


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
        """Count one attempt at one answer: seconds per scorer, and the scorer that failed."""
        for name, seconds in scorer_s.items():
            self.counts[f"scorer.{name}.answers"] += 1
            self._seconds[f"scorer.{name}.busy_s"] += seconds
            self._scorer_s.setdefault(name, deque(maxlen=WINDOW)).append(seconds)
        if failed_in:
            self.counts[f"scorer.{failed_in}.{kind}"] += 1

    def add_verdict(self, verdict: Verdict, queue_s: float) -> None:
        """Count one finished request."""
        self.counts[verdict.kind] += 1
        self._queue_s.append(queue_s)
        if verdict.attempts:  # cached verdicts do not measure scoring time
            self._seconds["busy_s"] += verdict.wall_s
            self._score_s.append(verdict.wall_s)

    def counters(self) -> dict[str, float]:
        """All counters in a flat dict, as counts and seconds."""
        flat: dict[str, float] = {**self.counts, **self._seconds}
        windows = {"score_": self._score_s, "queue_": self._queue_s}
        windows |= {f"scorer.{name}.": window for name, window in self._scorer_s.items()}
        for name, window in windows.items():
            flat |= {f"{name}{share}": seconds for share, seconds in percentiles(window).items()}
        return flat
