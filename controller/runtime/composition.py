"""Makes the components of a run from its configuration and connects them (the composition root).

Opening and closing is in session.py, the mapping of the configuration in wiring/.

| Component | Used by | Closed by |
|---|---|---|
| launcher, ledger, telemetry, signals (open before) | all others | the session |
| hub | every component that sends | the session, after the shutdown |
| coordinator | server, worker admin, monitor | - |
| supervisor | server, process starter, worker admin, trainer restart | the launcher ends its processes |
| process starter | worker admin, session | - |
| worker admin, trainer restart, admission | server | - |
| tracer | server | the session's exit stack |

No component starts a task or a process when it is made. The server's loops run them (server.py).
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from areal_like import __version__
from areal_like.config import ProcessSpec
from areal_like.process import boot_id
from areal_like.trace import Tracer
from areal_like.transport.channel import Hub
from areal_like.transport.credentials import candidate_credentials, credential_files, issue_credentials
from areal_like.wire.messages import JoinOffer
from controller.config.launchers import launcher_of
from controller.config.model_folder import files_without_weights
from controller.config.run_config import RunConfig
from controller.config.stall_limit import stall_limit_s
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.draws import Draws
from controller.data.curriculum import RowOutcome
from controller.data.eval_slices import LANGUAGE, slices_of_rows
from controller.data.forced_lengths import forced_lengths
from controller.preflight.dataset.languages import Detector
from controller.run_folder.invitation import Invitation
from controller.run_folder.run_folder import RunFolder
from controller.runtime.admission import Admission
from controller.runtime.components import RunComponents
from controller.runtime.control_requests import Requests
from controller.runtime.evaluation_watch import EvaluationWatch
from controller.runtime.inbound import ACCEPTED
from controller.runtime.open_session import OpenSession
from controller.runtime.outbound import TaskSettings
from controller.runtime.server import ServerSettings
from controller.runtime.starting_point import StartingPoint
from controller.runtime.supervisor import Supervisor
from controller.runtime.trainer_restart import TrainerRestart
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.journal import rows_of
from controller.telemetry.slice_recorder import SliceRecorder
from controller.wiring.coordinator_settings import coordinator_settings
from controller.wiring.process_specs import (
    Addresses,
    Role,
    new_worker_name,
    process_spec,
    reward_names,
    trace_settings,
    trainer_names,
    worker_names,
)

MIN_LETTERS = 20
"""A prompt with fewer letters has no detectable language, as in `areal-like data`."""


@dataclass(frozen=True)
class ProcessStarter:
    """Adds processes of the run to the supervisor, which starts them."""

    config: RunConfig
    folder: RunFolder
    supervisor: Supervisor
    addresses: Addresses
    run_id: str
    model_dir: Path
    lineage: str
    offered: set[str] = field(default_factory=set)
    """Names of external workers; the process that got one has its token for the whole session."""
    started: set[str] = field(default_factory=set)
    """Names of rollout workers that the run has started. An external worker with such a name would replace it in all
    records."""

    def add(self, role: Role, name: str, *, resume_from: Path | None = None) -> str:
        """Add one process to the supervisor; return its name."""
        restarts: dict[Role, int] = {
            "reward": self.config.reward.max_restarts,
            "rollout": self.config.rollout.max_restarts,
            "trainer": self.config.trainer.max_restarts,
        }
        issue_credentials(self.addresses.keys, role, name)
        if role == "rollout":
            self.started.add(name)
        spec = self._spec(role, name, resume_from=resume_from)
        self.supervisor.add(spec, self.folder.processes / f"{name}.json", restarts[role], time.monotonic())
        return name

    def add_worker(self) -> str:
        """Add one more rollout worker to the supervisor; return its name."""
        return self.add("rollout", new_worker_name({*self.supervisor.names, *self.offered}))

    def offer(self) -> tuple[ProcessSpec, JoinOffer]:
        """The spec of one more rollout worker that somebody else starts, and the message with everything it needs."""
        name = new_worker_name({*self.supervisor.names, *self.started, *self.offered})
        self.offered.add(name)  # before its token exists
        spec, keys = self._spec("rollout", name), issue_credentials(self.addresses.keys, "rollout", name)
        reward_keys = spec.reward_curve_dir
        try:
            offer = JoinOffer(
                name=name, spec=spec.model_dump_json(), keys=credential_files(keys),
                reward_keys=credential_files(Path(reward_keys), has_server=False) if reward_keys else {},
                model_files=files_without_weights(self.model_dir),
            )  # fmt: skip
        finally:
            shutil.rmtree(keys, ignore_errors=True)
        return spec, offer

    def _spec(self, role: Role, name: str, *, resume_from: Path | None = None) -> ProcessSpec:
        return process_spec(
            self.config, self.folder, self.addresses,
            run_id=self.run_id, role=role, name=name, model_dir=self.model_dir, lineage=self.lineage,
            resume_from=resume_from,
        )  # fmt: skip

    def add_all(self, checkpoint: Path | None, *, has_trainer: bool) -> None:
        """Add all processes with which the run starts to the supervisor."""
        for name in reward_names(self.config):
            self.add("reward", name)
        for name in trainer_names(self.config) if has_trainer else []:
            self.add("trainer", name, resume_from=checkpoint)
        for name in worker_names(self.config):
            self.add("rollout", name)


def make_hub(session: OpenSession) -> Hub:
    """Make the controller's hub, not started. The keys of the run must exist."""
    launch = session.config.launch
    return Hub(
        run_id=session.run_id,
        role="controller",
        bind=f"tcp://{session.launcher.host}:{launch.port or '*'}",
        curve_dir=session.folder.keys,
        accept=ACCEPTED,
    )


def invite(session: OpenSession, hub_address: str) -> None:
    """Write the invitation with which external workers join this session of the run."""
    keys = session.folder.keys
    Invitation(
        run=session.folder.name, run_id=session.run_id, release=__version__, address=hub_address,
        host=socket.gethostname(), boot_id=boot_id(),
        credentials={name: content.decode() for name, content in candidate_credentials(keys).items()},
    ).save(keys)  # fmt: skip


def make_supervisor(session: OpenSession, hub: Hub) -> Supervisor:
    """Make the supervisor, without processes."""
    launch = session.config.launch
    return Supervisor(
        session.launcher, hub,
        startup_timeout_s=launch.startup_timeout_s, silence_s=launch.silence_s,
        node_wait_s=launcher_of(session.config).node_wait_s(launch),
    )  # fmt: skip


def _draws(session: OpenSession, start: StartingPoint) -> Draws | None:
    """Make the curriculum, if configured; None: rows are drawn in order."""
    config = session.config
    if config.data.curriculum is None or session.is_evaluation:
        return None
    outcomes = (RowOutcome(*one) for one in session.ledger.row_outcomes(group_size=config.group_size))
    return session.rows.curriculum(
        config.data.curriculum, seed=config.data_seed, first=start.state.first_draw, outcomes=outcomes
    )


def compose(
    session: OpenSession, start: StartingPoint, hub: Hub, processes: ProcessStarter, new_address: Callable[[], str]
) -> RunComponents:
    """Make the components for the server. new_address: returns where the trainer's ranks meet after a restart."""
    config, folder, telemetry, supervisor = session.config, session.folder, session.telemetry, processes.supervisor
    settings = coordinator_settings(
        config,
        max_draws=session.rows.max_draws,
        num_eval_rows=session.rows.num_final,
        num_periodic_rows=session.rows.num_periodic,
    )
    coordinator = Coordinator.restore(settings, start.state, _draws(session, start))
    tracer = Tracer.of(folder.root, "controller", trace_settings(config))
    session.stack.callback(tracer.close)
    return RunComponents(
        coordinator=coordinator,
        ledger=session.ledger,
        hub=hub,
        supervisor=supervisor,
        worker_admin=WorkerAdmin(
            coordinator, supervisor, hub, Requests(folder.requests), add_worker=processes.add_worker, say=session.note
        ),
        trainer_restart=TrainerRestart(
            folder.root, session.ledger, supervisor, num_lineages=start.state.num_lineages + 1, new_address=new_address
        ),
        rows=session.rows,
        telemetry=telemetry,
        tracer=tracer,
        end=session.end,
        watch=_watch(session),
        slices=_slices(session, start.version),
        admission=Admission(
            coordinator, supervisor, hub, processes, obstacle=_obstacle(session), journal=telemetry.journal,
            say=session.note,
        ),
    )  # fmt: skip


def _obstacle(session: OpenSession) -> str:
    """Why no external worker can join; empty: it can."""
    if session.is_evaluation:
        return "an evaluation admits no further workers"
    if session.config.is_colocated:
        return "engines and trainer of this run share their devices (placement: colocated), so no worker can join"
    if session.config.encryption is not None:
        return "the run is encrypted, and a worker that joins would store its settings and logs in the clear"
    return ""


def _watch(session: OpenSession) -> EvaluationWatch:
    """What follows from evaluations; of a command that only evaluates: nothing."""
    config = session.config
    if session.is_evaluation:
        return EvaluationWatch()
    watch = EvaluationWatch(
        session.folder.root, best=config.trainer.checkpoint.best, early_stop=config.early_stop, say=session.note
    )
    watch.restore(session.telemetry.tally.eval_metrics)
    return watch


def _slices(session: OpenSession, version: int) -> SliceRecorder | None:
    """What compares evaluations in parts, if `eval.slices` is set. version: from which the run continues."""
    rows, settings = session.rows, session.config.eval
    if not settings.slices or rows.eval_table is None:
        return None
    detector = Detector(MIN_LETTERS) if LANGUAGE in settings.slices else None
    language = (lambda text: detector.detect(text)[0]) if detector is not None else None
    recorder = SliceRecorder(
        lambda: slices_of_rows(rows, settings.slices, language), rows.eval,
        names=settings.slices, num_samples=rows.layout.num_samples, solved_value=settings.solved_value,
    )  # fmt: skip
    recorder.restore(rows_of(session.folder.metrics, "slices"), version)
    return recorder


def server_settings(config: RunConfig) -> ServerSettings:
    """Settings of the server, from the configuration."""
    return ServerSettings(
        tasks=TaskSettings(
            seed=config.seed,
            train_sampling=config.train_sampling,
            eval_sampling=config.eval_sampling,
            segment_tokens=config.rollout.segment_tokens,
            forced_lengths=forced_lengths(config),
            load_deadline_s=config.trainer.weights.deadline_s,
        ),
        num_steps=config.num_steps,
        stop_on_long_prompt=config.data.on_long_prompt == "stop",
        stall_after_s=stall_limit_s(config),
        stop_grace_s=config.launch.stop_grace_s,
        client_addresses=config.client_addresses,
    )
