"""`RunComponents`: the components of a run that are made once and live until its end.

They are made in composition.py and closed by the session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_like.trace import Tracer
from areal_like.transport.channel import Hub
from controller.coordinator.coordinator import Coordinator
from controller.ledger.ledger import Ledger
from controller.runtime.admission import Admission
from controller.runtime.evaluation_watch import EvaluationWatch
from controller.runtime.outbound import Rows
from controller.runtime.outcome import RunEnd
from controller.runtime.supervisor import Supervisor
from controller.runtime.trainer_restart import TrainerRestart
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.slice_recorder import SliceRecorder
from controller.telemetry.telemetry import Telemetry


@dataclass(frozen=True)
class RunComponents:
    """All components that a `Server` uses. The module that opened a component closes it, after the server's
    shutdown.
    """

    coordinator: Coordinator
    ledger: Ledger
    hub: Hub
    supervisor: Supervisor
    worker_admin: WorkerAdmin
    trainer_restart: TrainerRestart
    rows: Rows
    telemetry: Telemetry
    tracer: Tracer
    end: RunEnd
    watch: EvaluationWatch = field(default_factory=EvaluationWatch)
    slices: SliceRecorder | None = None
    """None: evaluations are not compared in parts."""
    admission: Admission | None = None
    """None: no external workers are admitted."""
