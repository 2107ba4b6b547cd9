"""`Telemetry`: the display and files to which the runtime's components report.

Opened and closed in runtime/session.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.sinks import Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import Tally


@dataclass(frozen=True)
class Telemetry:
    """Display, metrics.jsonl, status.json, totals and metrics sinks of one session."""

    display: Display
    journal: Journal
    status: StatusFile
    tally: Tally
    sinks: Sinks
