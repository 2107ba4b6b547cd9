"""`OpenSession`: open resources of a session, from the lock on the run's folder to its end.

Opened and closed in session.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from controller.config.run_config import RunConfig
from controller.data.job_rows import JobRows
from controller.launch.launcher import Launcher
from controller.ledger.ledger import Ledger
from controller.ledger.mirror import LedgerHome
from controller.run_folder.run_folder import RunFolder
from controller.runtime.outcome import RunEnd
from controller.runtime.signals import Signals
from controller.telemetry.display import Level
from controller.telemetry.telemetry import Telemetry


@dataclass(frozen=True)
class OpenSession:
    """The run and the resources of its session."""

    config: RunConfig
    folder: RunFolder
    run_id: str
    rows: JobRows
    is_evaluation: bool
    launcher: Launcher
    ledger: Ledger
    ledger_home: LedgerHome | None
    """Location of the ledger if it is not in the run folder."""
    telemetry: Telemetry
    signals: Signals
    end: RunEnd
    stack: contextlib.ExitStack
    """Closes resources opened by later steps in reverse order, after the processes have exited."""

    def note(self, text: str, level: Level = "info") -> None:
        """Show a line to the user."""
        self.telemetry.display.note(text, level)
