"""The life of one job, from configuration to summary: train, resume, sft, evaluate.

Owns: the order of things (folder, model, processes, coordinator, end). Refuses: what happens while samples flow
(server, coordinator), how processes are spawned (launch/), words on screen (display.py).

Whatever happens, the end is the same: processes are stopped, shared memory is given back, the ledger is closed, summary
and trace are written, the status file says how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from areal_like.channel import Hub
from areal_like.config import dump_yaml
from areal_like.curve import make_run_keys
from areal_like.errors import OperationError, ProcessDied, UserError
from areal_like.metrics import JsonlLog
from areal_like.trace import Tracer, merge_traces
from areal_like.weights import WeightStore, default_root, sweep_dead
from controller import protocol as p
from controller.audit import audit
from controller.config import RunConfig
from controller.coordinator import Coordinator
from controller.display import Display
from controller.job_rows import JobRows
from controller.launch.local import LocalLauncher
from controller.ledger import Ledger
from controller.overrides import build
from controller.preparation import prepare
from controller.run_folder import RunFolder, Status
from controller.server import ACCEPTED, Outcome, Server, ServerSettings, StoppedAtOnce
from controller.signals import Signals
from controller.summary import Tally, print_summary, write_summary
from controller.supervision import Supervisor
from controller.validate import is_loopback
from controller.wiring import Addresses, Role, checkpoint_problem, coordinator_settings, process_spec, worker_names

MAX_TRAINER_RESTARTS = 0
"""The trainer is not restarted by itself: the run ends as failed and is continued with `areal-like resume`."""
EXIT_STATUS: Mapping[str, int] = {"completed": 0, "exhausted": 0, "stopped": 0, "failed": 1}
RUN_STATUS: Mapping[str, Status] = {
    "completed": "finished",
    "exhausted": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def train(config: RunConfig, *, source: str = "") -> int:
    """Run a job in a folder of its own; returns the exit status. Raises UserError, OperationError."""
    rows = JobRows.load(config)
    folder = RunFolder.create(Path(config.runs_dir), config.name)
    folder.config.write_text((f"# resolved from {source}\n" if source else "") + dump_yaml(config))
    folder.write_state("running")
    return asyncio.run(Job(config, folder, rows).run())


def resume(run: Path) -> int:
    """Continue an interrupted or crashed run from its last checkpoint and ledger; returns the exit status."""
    folder = RunFolder.find(run)
    folder.refuse_if_running()
    config = read_config(folder)
    if folder.read_state().get("status") == "finished":
        raise UserError(
            "this run is finished", where=str(folder.root), remedy="start another with more steps (num_steps=...)"
        )
    rows = JobRows.load(config)
    folder.write_state("running")
    return asyncio.run(Job(config, folder, rows, is_resume=True).run())


def evaluate(config: RunConfig) -> int:
    """Score the model on data.eval and print the accuracy; returns the exit status."""
    rows = JobRows.load(config, needs_train=False)
    if rows.eval_table is None:
        raise UserError(
            "there is nothing to evaluate on", where="data.eval", remedy="name a data set: data.eval.path=..."
        )
    folder = RunFolder.create(Path(config.runs_dir), f"{config.name}-eval")
    config = config.model_copy(update={"num_steps": 0, "eval": config.eval.model_copy(update={"at_start": True})})
    folder.config.write_text(dump_yaml(config))
    folder.write_state("running")
    return asyncio.run(Job(config, folder, rows, is_evaluation=True).run())


def sft(config: RunConfig) -> int:
    """Run the supervised warm start alone and write the model to `out` (or the run folder); returns the exit status."""
    if config.warm_start is None:
        raise UserError(
            "there are no supervised steps", where="warm_start", remedy="add warm_start.data and warm_start.sft"
        )
    folder = RunFolder.create(Path(config.runs_dir), f"{config.name}-sft")
    folder.config.write_text(dump_yaml(config))
    folder.write_state("running")
    out_dir = Path(config.out).resolve() if config.out else folder.final
    if out_dir.exists():
        raise UserError("something lies there already", where=f"out: {out_dir}", remedy="name a new folder")

    async def run() -> None:
        launcher = LocalLauncher(folder.logs)
        with Display(config.metrics.display) as display:
            try:
                await prepare(config, folder, launcher, display, out_dir=out_dir)
            finally:
                await launcher.stop_all(grace_s=2.0)

    with _ends_as(folder):
        asyncio.run(run())
    Console(soft_wrap=True, highlight=False).print(f"model: {out_dir}")
    return 0


def read_config(folder: RunFolder) -> RunConfig:
    """The resolved configuration of a run. Raises UserError when it is damaged or of another version."""
    try:
        data = yaml.safe_load(folder.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read it ({error})", where=str(folder.config), remedy="start a new run") from error
    config, problems = build(data if isinstance(data, dict) else {})
    if config is None or problems:
        raise UserError("; ".join(str(problem) for problem in problems), where=str(folder.config))
    return config


@contextlib.contextmanager
def _ends_as(folder: RunFolder) -> Iterator[None]:
    """The status file says how it ended, whatever happens inside."""
    try:
        yield
    except BaseException as error:
        folder.write_state("failed", reason=str(error))
        raise
    folder.write_state("finished")


@dataclass
class Job:
    """One stretch of a run, in this process."""

    config: RunConfig
    folder: RunFolder
    rows: JobRows
    is_resume: bool = False
    is_evaluation: bool = False
    tally: Tally = field(default_factory=Tally)
    _prepare_s: float = 0.0

    async def run(self) -> int:
        """To the end; prints the summary and returns the exit status. Raises what ended it."""
        started_s = time.monotonic()
        outcome = Outcome("failed", "ended by an error of the controller")
        launcher = LocalLauncher(self.folder.logs)
        with contextlib.ExitStack() as stack:
            display = stack.enter_context(Display(self.config.metrics.display))
            counts: dict[str, Any] = {}
            try:
                outcome = await self._serve(launcher, display, stack, counts)
            except (UserError, OperationError) as error:
                outcome = Outcome("failed", str(error), error)
            finally:
                grace_s = 5.0 if outcome.status == "failed" else self.config.launch.stop_grace_s
                if isinstance(outcome.error, StoppedAtOnce):
                    grace_s = 0.5
                await launcher.stop_all(grace_s)
                self.folder.write_state(RUN_STATUS[outcome.status], reason=outcome.reason)
        return self._finish(outcome, counts, time.monotonic() - started_s)

    # ------------------------------------------------------------ pieces

    async def _serve(
        self, launcher: LocalLauncher, display: Display, stack: contextlib.ExitStack, counts: dict[str, Any]
    ) -> Outcome:
        config, folder = self.config, self.folder
        run_id = str(folder.read_state()["run_id"])
        display.note(f"run {folder.name}: {folder.root}")
        sweep_dead()
        weight_dir = default_root(run_id, config.trainer.weights.kind, folder.root)
        stack.callback(WeightStore(weight_dir, config.trainer.weights.kind, keep=2).close, remove=True)
        stop = Signals()
        stack.enter_context(stop)
        prepared = await stop.unless_asked(
            prepare(config, folder, launcher, display, publish_to=weight_dir if self.is_evaluation else None,
                    out_dir=folder.root / "model" if self.is_evaluation else None)
        )  # fmt: skip
        if prepared is None:
            return Outcome("stopped", "stopped before the first step; continue with areal-like resume")
        self._prepare_s = prepared.wall_s
        ledger = stack.enter_context(
            Ledger(
                folder.root,
                run_id=run_id,
                must_exist=self.is_resume,
                segment_bytes=int(config.ledger.segment_mb * 2**20),
                keep_bytes=None if config.ledger.keep_mb is None else int(config.ledger.keep_mb * 2**20),
            )
        )
        state = ledger.load()
        settings = coordinator_settings(
            config,
            max_draws=self.rows.max_draws,
            num_eval_rows=self.rows.num_final,
            num_periodic_rows=self.rows.num_periodic,
        )
        coordinator = Coordinator.restore(settings, state)
        checkpoint = None if self.is_evaluation else self._checkpoint(state, display)
        lineage = f"l{state.num_lives}"
        curve_dir = self._keys()
        hub = Hub(
            run_id=run_id,
            role="controller",
            bind=f"tcp://{config.launch.host}:{config.launch.port or '*'}",
            curve_dir=curve_dir,
            accept=ACCEPTED,
        )
        address = await hub.start()
        try:
            addresses = Addresses(address, f"tcp://127.0.0.1:{_free_port()}", weight_dir, curve_dir)
            supervisor = Supervisor(
                launcher, hub,
                startup_timeout_s=config.launch.startup_timeout_s, silence_s=config.launch.silence_s,
            )  # fmt: skip
            version = checkpoint.version if checkpoint else 0
            self._enlist(supervisor, addresses, run_id, prepared.model_dir, lineage, checkpoint)
            self._remember(state, version)
            server = self._server(coordinator, ledger, hub, supervisor, display, stack)
            stop.hand_to(server.request_stop)
            first: list[p.Event] = [p.RunStarted(lineage=lineage, checkpoint_version=version)]
            if self.is_evaluation:
                manifest = WeightStore(weight_dir, config.trainer.weights.kind, keep=2).newest()
                first.append(p.Published(version=0, lineage="l0", manifest_path=str(manifest)))
            outcome = await server.run(first)
            await server.farewell(grace_s=10.0)
            counts.update(self._counts(coordinator, ledger.load()))
            return outcome
        finally:
            await hub.close()

    def _checkpoint(self, state: p.LedgerState, display: Display) -> p.CheckpointRecord | None:
        """The newest reported checkpoint that is whole on disk."""
        for record in reversed(state.checkpoints):
            problem = checkpoint_problem(Path(record.path))
            if problem is None:
                display.note(f"continuing from {record.path} (version {record.version})")
                return record
            display.note(f"checkpoint {record.path} is left out: {problem}", "warning")
        return None

    def _keys(self) -> Path | None:
        config = self.config
        if config.launch.curve == "off" or (config.launch.curve == "auto" and is_loopback(config.launch.host)):
            return None
        if not self.folder.keys.exists():
            make_run_keys(self.folder.keys)
        return self.folder.keys

    def _enlist(
        self,
        supervisor: Supervisor,
        addresses: Addresses,
        run_id: str,
        model_dir: Path,
        lineage: str,
        checkpoint: p.CheckpointRecord | None,
    ) -> None:
        """Put every process of the run under supervision."""
        config = self.config
        members: list[tuple[Role, str, int]] = [("reward", "reward", config.reward.max_restarts)]
        if not self.is_evaluation:
            members.append(("trainer", "trainer", MAX_TRAINER_RESTARTS))
        members += [("rollout", name, config.rollout.max_restarts) for name in worker_names(config)]
        for role, name, max_restarts in members:
            spec = process_spec(
                config, self.folder, addresses, run_id=run_id, role=role, name=name, model_dir=model_dir,
                lineage=lineage, resume_from=Path(checkpoint.path) if checkpoint and role == "trainer" else None,
            )  # fmt: skip
            supervisor.add(spec, self.folder.processes / f"{name}.json", max_restarts, time.monotonic())

    def _remember(self, state: p.LedgerState, version: int) -> None:
        """After a resume: what the surviving steps of earlier stretches consumed belongs to the run's totals."""
        for batch in state.batches:
            if batch.step <= version:
                self.tally.add_history([batch.step - 1 - group.first_version for group in batch.groups])

    def _server(
        self,
        coordinator: Coordinator,
        ledger: Ledger,
        hub: Hub,
        supervisor: Supervisor,
        display: Display,
        stack: contextlib.ExitStack,
    ) -> Server:
        config = self.config
        max_events = config.metrics.max_trace_events if config.metrics.trace else 0
        tracer = Tracer(self.folder.logs / "controller.trace.jsonl", "controller", max_events=max_events)
        stack.callback(tracer.close)
        metrics = JsonlLog(self.folder.metrics)
        stack.callback(metrics.close)
        settings = ServerSettings(
            seed=config.seed,
            num_steps=config.num_steps,
            train_sampling=config.train_sampling,
            eval_sampling=config.eval_sampling,
            segment_tokens=config.rollout.segment_tokens,
            stop_on_long_prompt=config.data.on_long_prompt == "stop",
            stall_after_s=config.launch.stall_after_s,
            stop_grace_s=config.launch.stop_grace_s,
        )
        return Server(
            settings, coordinator=coordinator, ledger=ledger, hub=hub, supervisor=supervisor, rows=self.rows,
            display=display, tally=self.tally, metrics=metrics, tracer=tracer,
        )  # fmt: skip

    def _counts(self, coordinator: Coordinator, state: p.LedgerState) -> dict[str, Any]:
        """Groups and samples by fate. A batch that was shipped but not trained (a stop came between) is in flight."""
        counts, size = coordinator.counts(), self.config.group_size
        done = [batch for batch in state.batches if batch.step <= coordinator.version]
        num_groups = sum(len(batch.groups) for batch in done)
        num_samples = sum(len(group.sample_indices) for batch in done for group in batch.groups)
        num_dropped = sum(counts.dropped.values())
        return {
            "groups_drawn": counts.drawn,
            "groups_consumed": num_groups,
            "groups_filtered": counts.filtered,
            "groups_dropped": num_dropped,
            "dropped_by_reason": counts.dropped,
            "groups_in_flight": counts.in_flight + counts.consumed - num_groups,
            "samples_consumed": num_samples,
            "samples_filtered": counts.filtered * size,
            "samples_dropped": num_dropped * size + num_groups * size - num_samples,
        }

    def _finish(self, outcome: Outcome, counts: dict[str, Any], wall_s: float) -> int:
        """Summary, trace, audit, words; then the exit status, or the error that ended the run."""
        folder, console = self.folder, Console(soft_wrap=True, highlight=False)
        if self.config.metrics.trace:
            merge_traces(folder.root)
        if counts:
            if not self.is_evaluation:
                counts["audit"] = _audit_words(folder)
            summary = self.tally.summary(counts, status=outcome.status, wall_s=wall_s, prepare_s=self._prepare_s)
            write_summary(folder.summary, summary)
            print_summary(summary, folder.root, console)
        if outcome.reason and outcome.status != "completed":
            console.print(outcome.reason)
        if isinstance(outcome.error, ProcessDied):
            console.print(f"--- end of {folder.logs / (outcome.error.name + '.log')}")
            console.print(outcome.error.tail, markup=False)
        if outcome.error is not None:
            raise outcome.error
        if outcome.status == "failed":
            raise OperationError(outcome.reason)
        return EXIT_STATUS[outcome.status]


def _audit_words(folder: RunFolder) -> str:
    report = audit(folder.root)
    return "clean" if not report.findings else "; ".join(str(finding) for finding in report.findings[:5])


def _free_port() -> int:
    """A port nobody listens on now. It stays the same over restarts of the service, so clients find it again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
