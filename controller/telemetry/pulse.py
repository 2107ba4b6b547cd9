"""What a run looks like at one moment, and how often that is written down.

Owns: the facts of a process as rows show them, the pace of pulses. Refuses: collecting them (monitor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_INTERVAL_S = 2.0
PULSES_PER_LIFETIME = 500
"""A pulse comes after one 500th of the time so far: a run of a day has some 2700 of them, one of a week 3700."""
PROCESSES_PER_PULSE = 16
"""With more processes a pulse is longer, and comes more rarely in proportion."""


@dataclass(frozen=True)
class ProcessNow:
    """One process of the run. `counters`: of its newest heartbeat, cumulative since this incarnation began."""

    role: str
    state: str
    pid: int | None = None
    incarnation: str = ""
    """Empty while it starts."""
    counters: Mapping[str, float] = field(default_factory=dict)
    rss_mb: float | None = None
    """Resident memory in MiB, without its children; None when it cannot be known."""

    def row(self) -> dict[str, Any]:
        """As it stands in pulses and status.json."""
        return {
            "role": self.role, "state": self.state, "pid": self.pid, "incarnation": self.incarnation,
            "rss_mb": self.rss_mb, "counters": {key: round(value, 4) for key, value in self.counters.items()},
        }  # fmt: skip


def interval_s(elapsed_s: float, num_processes: int) -> float:
    """Seconds to the next pulse of a run that is `elapsed_s` old."""
    return max(FIRST_INTERVAL_S, elapsed_s / PULSES_PER_LIFETIME) * max(1.0, num_processes / PROCESSES_PER_PULSE)
