"""Pulses: the state of a run's processes at one moment, and the interval at which it is written.

The state is collected in runtime/monitor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRST_INTERVAL_S = 2.0
PULSES_PER_LIFETIME = 500
"""A pulse is written after one 500th of the elapsed time: a run of a day has some 2700 of them, one of a week 3700."""
PROCESSES_PER_PULSE = 16
"""With more processes a pulse is larger, and is written less often in proportion."""


@dataclass(frozen=True)
class ProcessNow:
    """One process of the run. `counters`: from its newest heartbeat, cumulative since its incarnation started."""

    role: str
    state: str
    pid: int | None = None
    incarnation: str = ""
    """State; empty while it starts."""
    counters: Mapping[str, float] = field(default_factory=dict)
    rss_mb: float | None = None
    """Resident memory in MiB, without its children; None if unknown."""
    host: str = ""
    """Machine of an external worker; empty: the run started the process."""

    def row(self) -> dict[str, Any]:
        """The process as written to pulses and status.json."""
        return {
            "role": self.role, "state": self.state, "pid": self.pid, "incarnation": self.incarnation,
            "rss_mb": self.rss_mb, "counters": {key: round(value, 4) for key, value in self.counters.items()},
            **({"host": self.host} if self.host else {}),
        }  # fmt: skip


def interval_s(elapsed_s: float, num_processes: int) -> float:
    """Seconds to the next pulse of a run that is `elapsed_s` old."""
    return max(FIRST_INTERVAL_S, elapsed_s / PULSES_PER_LIFETIME) * max(1.0, num_processes / PROCESSES_PER_PULSE)
