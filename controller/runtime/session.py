"""One session of a run in this process: from the lock on its folder to summary and exit status.

Owns: the order of things (lock, model, hub, processes, coordinator, farewell, end). Refuses: which session it is
(jobs.py), what happens while samples flow (server, coordinator), how processes are spawned (launch/), words on screen
(display.py).

Whatever happens, the end is the same: processes are stopped, shared memory is given back, the ledger is closed, summary
and trace are written, the status file says how it ended. Nothing of the folder is touched before its ledger is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_like import reaper
from areal_like.errors import LedgerError, OperationError, ProcessDied, UserError
from areal_like.plain_text import LineFormatter, printable
from areal_like.store_owner import SHARED_MEMORY, claim, sweep_dead
from areal_like.trace import Tracer, merge_traces
from areal_like.transport.channel import Hub
from areal_like.transport.credentials import issue_credentials, make_run_credentials
from areal_like.weights.weight_store import WeightStore, default_root
from controller.config.launchers import launcher_of
from controller.config.model_folder import weight_bytes
from controller.config.run_config import RunConfig
from controller.config.stall_limit import stall_limit_s
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.events import Event, Published, RunStarted
from controller.coordinator.snapshot import LedgerState
from controller.data.forced_lengths import forced_lengths
from controller.data.job_rows import JobRows
from controller.launch.choice import launcher_for
from controller.launch.launcher import Launcher
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger
from controller.ledger.mirror import LedgerHome
from controller.preflight.reward_services import check_services
from controller.report.at_end import draw_report
from controller.run_folder.run_folder import DamagedState, RunFolder, Status
from controller.runtime.continuity import Findings, check_continuity, refuse, refuse_absent_ledger
from controller.runtime.control_requests import Requests
from controller.runtime.inbound import ACCEPTED
from controller.runtime.model_preparation import prepare, prepare_process
from controller.runtime.outbound import TaskSettings
from controller.runtime.outcome import Outcome
from controller.runtime.server import Server, ServerSettings
from controller.runtime.signals import Signals
from controller.runtime.supervisor import Supervisor
from controller.runtime.trainer_restart import TrainerRestart, find_checkpoint
from controller.runtime.worker_admin import WorkerAdmin
from controller.telemetry.display import Display
from controller.telemetry.journal import Journal
from controller.telemetry.opening import open_sinks
from controller.telemetry.sinks import Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import Tally, fates, print_summary, write_summary
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

FAREWELL_S = 10.0
MIN_STORE_BYTES = 64 << 20
"""Shared memory asked for at least, also where the model's size is not known yet."""
SINK_GRACE_S = 5.0
"""Time for metrics sinks to write what waits, all together."""
FAILED_GRACE_S = 5.0
"""Time to end for processes of a run that failed: there is nothing left to save."""
EXIT_STATUS: Mapping[str, int] = {"completed": 0, "exhausted": 0, "stopped": 0, "failed": 1}
RUN_STATUS: Mapping[str, Status] = {
    "completed": "finished",
    "exhausted": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


@dataclass
class RunSession:
    """One session of a run. `run` once."""

    config: RunConfig
    folder: RunFolder
    rows: JobRows
    is_resume: bool = False
    is_evaluation: bool = False
    accept_loss: bool = False
    """Continue although files of the run are missing or older than others (continuity.py)."""
    tally: Tally = field(default_factory=Tally)
    _prepare_s: float = 0.0
    _base: int = 0
    """Version the trainer starts from."""
    _server: Server | None = None
    _home: LedgerHome | None = None
    """Where the ledger is written when it is not in the run folder."""
    _status: StatusFile = field(init=False)
    _sinks: Sinks = field(default_factory=lambda: Sinks([]))
    _counts: dict[str, Any] = field(default_factory=dict)

    async def run(self) -> int:
        """To the end; prints the summary and returns the exit status. Raises what ended it."""
        started_s = time.monotonic()
        outcome = Outcome("failed", "ended by an error of the controller")
        launcher = launcher_for(self.config, self.folder)
        with contextlib.ExitStack() as stack:
            self._home = self._ledger_home(stack)
            ledger = stack.enter_context(self._ledger())
            if self.is_resume:
                self._check_continuity(ledger)
            self.folder.write_state("running")
            stack.enter_context(_logging_to(self.folder.logs / "controller.log"))
            status = self._status = StatusFile(
                self.folder.status, run=self.folder.name, num_steps=self.config.num_steps
            )
            status.write("preparing")
            stop = stack.enter_context(Signals())
            display = stack.enter_context(Display(self.config.metrics.display))
            journal = stack.enter_context(contextlib.closing(Journal(self.folder.metrics)))
            try:
                self._sinks = open_sinks(self.config, self.folder, self._run_id(), display.note)
                journal.listen(self._sinks)
                outcome = await self._serve(ledger, launcher, display, stop, stack, journal)
            except (UserError, OperationError, OSError) as error:
                outcome = Outcome.of(error)
            finally:
                grace_s = FAILED_GRACE_S if outcome.status == "failed" else self.config.launch.stop_grace_s
                await launcher.stop_all(grace_s, self._is_hurried)
                await launcher.close()
                await self._close_sinks(journal)
                status.end(RUN_STATUS[outcome.status])
                self.folder.write_state(RUN_STATUS[outcome.status], reason=outcome.reason)
        return self._finish(outcome, time.monotonic() - started_s)

    def _is_hurried(self) -> bool:
        return self._server is not None and self._server.is_hurried

    async def _close_sinks(self, journal: Journal) -> None:
        """Within SINK_GRACE_S: what a sink has not written by then is lost, and counted."""
        grace_s = 0.0 if self._is_hurried() else SINK_GRACE_S
        for news in await asyncio.to_thread(self._sinks.close, grace_s):
            with contextlib.suppress(OSError):  # a full disk is why the run ends
                journal.measure("sink", **news.facts())

    # ------------------------------------------------------------ pieces

    def _run_id(self) -> str:
        if not (run_id := self.folder.read_state().get("run_id")):
            raise DamagedState("it contains no run id", where=str(self.folder.state), remedy="restore it from a copy")
        return str(run_id)

    def _ledger_home(self, stack: contextlib.ExitStack) -> LedgerHome | None:
        """Where the ledger is written when it is not in the run folder; it is mirrored there, at last when all ends."""
        mirroring = launcher_of(self.config).mirroring(self.config.launch)
        if mirroring is None:
            return None
        local_dir = Path(mirroring.local_dir).expanduser() if mirroring.local_dir else None
        home = LedgerHome(self.folder.root, local_dir, self._run_id())
        home.open()
        stack.callback(home.close)
        return home

    def _ledger(self) -> Ledger:
        """The ledger, and with it the lock that makes the folder ours. Raises UserError when another has it.

        A run that was stopped during its preparation has an empty one; one that has made progress cannot have none.
        """
        config = self.config.ledger
        root = self._home.folder if self._home else self.folder.root
        if self.is_resume:
            refuse_absent_ledger(self.folder, root / LEDGER_FILE, accept_loss=self.accept_loss)
        return Ledger(
            root,
            run_id=self._run_id(),
            segment_bytes=int(config.segment_mb * 2**20),
            keep_bytes=None if config.keep_mb is None else int(config.keep_mb * 2**20),
        )

    def _check_continuity(self, ledger: Ledger) -> None:
        """Raises UserError where the run's files disagree. A mirror is known to be as old as its last copy."""
        check_continuity(
            self.folder, ledger, self._run_id(),
            accept_loss=self.accept_loss,
            is_mirror=self._home is not None and self._home.is_restored,
            say=lambda words: print(f"warning: {words}", file=sys.stderr),
        )  # fmt: skip

    async def _serve(
        self,
        ledger: Ledger,
        launcher: Launcher,
        display: Display,
        stop: Signals,
        stack: contextlib.ExitStack,
        journal: Journal,
    ) -> Outcome:
        config, folder = self.config, self.folder
        run_id, weights = self._run_id(), config.trainer.weights.layout
        display.note(f"run {folder.name}: {folder.root}")
        if config.reward.addresses:
            for line in await check_services(config):
                display.note(line)
        sweep_dead()
        sweep_dead(Path(tempfile.gettempdir()))  # folders of _private_folder where there is no shared memory
        if not await stop.unless_asked(launcher.open(display.note)):
            return Outcome("stopped", "before the first step")
        published_to = self._weight_dir(display, stack, folder.root / "model") if self.is_evaluation else None
        preparing = prepare(
            config, folder, launcher, display, publish_to=published_to,
            out_dir=folder.root / "model" if self.is_evaluation else None,
        )  # fmt: skip
        async with self._status.preparing(lambda: display.progress_text, lambda: prepare_process(launcher)):
            prepared = await stop.unless_asked(preparing)
        if prepared is None:
            return Outcome("stopped", "before the first step")
        self._prepare_s = prepared.wall_s
        weight_dir = published_to or self._weight_dir(display, stack, prepared.model_dir)
        state = ledger.load()
        coordinator = self._coordinator(state)
        checkpoint = None if self.is_evaluation else self._checkpoint(ledger, state, display)
        lineage = f"l{state.num_lineages}"
        self._remember(ledger, state)
        make_run_credentials(folder.keys)
        hub = Hub(
            run_id=run_id,
            role="controller",
            bind=f"tcp://{launcher.host}:{config.launch.port or '*'}",
            curve_dir=folder.keys,
            accept=ACCEPTED,
        )
        address = await hub.start()
        try:
            rewards = tuple([await launcher.address_for(name) for name in reward_names(config)])
            new_meeting = functools.partial(_meeting_place, stack.enter_context(_private_folder()))
            addresses = Addresses(address, rewards, weight_dir, folder.keys, new_meeting())
            supervisor = Supervisor(
                launcher, hub,
                startup_timeout_s=config.launch.startup_timeout_s, silence_s=config.launch.silence_s,
                node_wait_s=launcher_of(config).node_wait_s(config.launch),
            )  # fmt: skip
            enlist = functools.partial(
                self._enlist, supervisor, addresses, run_id=run_id, model_dir=prepared.model_dir, lineage=lineage
            )
            self._enlist_all(enlist, checkpoint)
            crew = WorkerAdmin(
                coordinator, supervisor, hub, Requests(folder.requests),
                add_worker=lambda: enlist("rollout", new_worker_name(supervisor.names)), say=display.note,
            )  # fmt: skip
            restart = TrainerRestart(
                folder.root, ledger, supervisor, num_lineages=state.num_lineages + 1, new_address=new_meeting
            )
            server = self._server = self._make_server(
                coordinator, ledger, hub, supervisor, crew, restart, display, stack, journal
            )
            stop.hand_to(server.request_stop)
            first: list[Event] = [RunStarted(lineage=lineage, checkpoint_version=self._base)]
            if self.is_evaluation:
                manifest = WeightStore(weight_dir, weights, keep=2).newest()
                first.append(Published(version=0, lineage=lineage, manifest_path=str(manifest)))
            async with self._mirrored(server, display):
                outcome = await server.run(first)
                await server.farewell(FAREWELL_S)
            self._count(coordinator, ledger)
            return outcome
        finally:
            await hub.close()

    def _weight_dir(self, display: Display, stack: contextlib.ExitStack, model_dir: Path) -> Path:
        """The weight store's folder, in shared memory where all the versions it holds at once have room."""
        weights = self.config.trainer.weights
        need_bytes = max(MIN_STORE_BYTES, weight_bytes(model_dir) * (weights.keep + 1))
        run_dir = Path(weights.shared_dir) / self._run_id() if weights.shared_dir else self.folder.root
        is_one_machine = launcher_of(self.config).is_one_machine
        place = weights.place if is_one_machine else "disk"  # each node has its own memory
        folder = default_root(self._run_id(), place, run_dir, need_bytes)
        if place == "shm" and folder.is_relative_to(self.folder.root):
            display.note(f"no room in shared memory: weights are transferred through {folder}", "warning")
        with contextlib.suppress(OSError):  # without it the next run removes what a killed one has left
            stack.callback(reaper.start())
        stack.callback(sweep_dead)  # what workers that were killed had put together
        stack.callback(WeightStore(folder, weights.layout, keep=2).close, remove=True)
        return folder

    @contextlib.asynccontextmanager
    async def _mirrored(self, server: Server, display: Display) -> AsyncIterator[None]:
        """Keep the run folder's copy of the ledger up to date meanwhile, where it is one."""
        home, mirroring = self._home, launcher_of(self.config).mirroring(self.config.launch)
        if home is None or mirroring is None:
            yield
            return
        keeping = asyncio.create_task(home.keep_up(lambda: server.saved_version, mirroring.every_s, display.note))
        try:
            yield
        finally:
            keeping.cancel()

    def _coordinator(self, state: LedgerState) -> Coordinator:
        rows = self.rows
        settings = coordinator_settings(
            self.config,
            max_draws=rows.max_draws,
            num_eval_rows=rows.num_final,
            num_periodic_rows=rows.num_periodic,
        )
        return Coordinator.restore(settings, state)

    def _checkpoint(self, ledger: Ledger, state: LedgerState, display: Display) -> Path | None:
        """What the trainer continues from; sets `_base`."""
        found = find_checkpoint(self.folder.root, num_batches=len(state.batches), ledger_seq=ledger.seq)
        for words in found.left_out:
            display.note(words, "warning")
        if found.path is None and found.left_out and not self.accept_loss:
            refuse(self.folder, Findings(lossy=[*found.left_out, "no checkpoint is left to continue from"]))
        self._base = found.version
        if found.path is not None:
            display.note(f"continuing from {found.path} (version {found.version})")
        elif self.is_resume:
            display.note("no checkpoint: continuing from the starting policy, with the recorded samples", "warning")
        return found.path

    def _enlist_all(self, enlist: Callable[..., str], checkpoint: Path | None) -> None:
        """Put every process of the run under supervision."""
        for name in reward_names(self.config):
            enlist("reward", name)
        if not self.is_evaluation:
            for name in trainer_names(self.config):
                enlist("trainer", name, resume_from=checkpoint)
        for name in worker_names(self.config):
            enlist("rollout", name)

    def _enlist(self, supervisor: Supervisor, addresses: Addresses, role: Role, name: str, **facts: Any) -> str:
        """Put one process under supervision; returns its name."""
        config = self.config
        restarts: dict[Role, int] = {
            "reward": config.reward.max_restarts,
            "rollout": config.rollout.max_restarts,
            "trainer": config.trainer.max_restarts,
        }
        issue_credentials(addresses.keys, role, name)
        spec = process_spec(config, self.folder, addresses, role=role, name=name, **facts)
        path = self.folder.processes / f"{name}.json"
        supervisor.add(spec, path, restarts[role], time.monotonic())
        return name

    def _remember(self, ledger: Ledger, state: LedgerState) -> None:
        """After a resume: what the surviving steps of earlier sessions consumed and scored is part of the run."""
        for batch in state.batches:
            if batch.step <= self._base:
                self.tally.add_history([batch.step - 1 - group.first_version for group in batch.groups])
        self.tally.lengths.restore(ledger.length_facts(), state.live)
        for version, values in ledger.evaluations().items():
            if version <= self._base:
                self.tally.add_evaluation(version, values)

    def _make_server(
        self,
        coordinator: Coordinator,
        ledger: Ledger,
        hub: Hub,
        supervisor: Supervisor,
        crew: WorkerAdmin,
        restart: TrainerRestart,
        display: Display,
        stack: contextlib.ExitStack,
        journal: Journal,
    ) -> Server:
        config = self.config
        tracer = Tracer.of(self.folder.root, "controller", trace_settings(config))
        stack.callback(tracer.close)
        settings = ServerSettings(
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
        )
        return Server(
            settings, coordinator=coordinator, ledger=ledger, hub=hub, supervisor=supervisor, crew=crew,
            trainer_restart=restart, rows=self.rows, display=display, tally=self.tally, journal=journal,
            status=self._status, sinks=self._sinks, tracer=tracer,
        )  # fmt: skip

    # ------------------------------------------------------------ the end

    def _count(self, coordinator: Coordinator, ledger: Ledger) -> None:
        state = ledger.load()
        version = max(coordinator.version, self._base)
        found = fates(coordinator.counts(), state.batches, group_size=self.config.group_size, version=version)
        emulation = self.config.emulation
        labels = {"emulated": emulation.words} if emulation else {}
        restarts = {"trainer_restarts": state.num_trainer_restarts}
        self._counts = {**found, "lives": state.num_lives, **restarts, **labels}

    def _finish(self, outcome: Outcome, wall_s: float) -> int:
        """Summary, trace, audit, words; then the exit status, or the error that ended the run."""
        folder, console = self.folder, Console(soft_wrap=True, highlight=False, markup=False)
        if self.is_evaluation and outcome.status == "completed" and not self.tally.accuracy:
            outcome = Outcome("failed", f"no answer was scored; see {folder.logs}")
            self._status.end("failed")
            folder.write_state("failed", reason=outcome.reason)
        if self.config.metrics.trace:
            merge_traces(folder.root)
        if self._counts:
            if not self.is_evaluation:
                self._counts["audit"] = _audit_words(folder)
            if sinks := self._sinks.counts():
                self._counts["sinks"] = sinks
            summary = self.tally.summary(self._counts, status=outcome.status, wall_s=wall_s, prepare_s=self._prepare_s)
            write_summary(folder.summary, summary)
            is_blank = outcome.status == "failed" and not self.tally.steps and not self.tally.accuracy
            if not is_blank:  # a page of zeros would hide the error
                print_summary(summary, folder.root, console)
            if self.config.metrics.report and not is_blank and not self.is_evaluation and not self._is_hurried():
                console.print(draw_report(folder.root))
        error = outcome.error or (OperationError(outcome.reason) if outcome.status == "failed" else None)
        if outcome.status == "stopped" and error is None:
            console.print(f"stopped ({outcome.reason}); continue with: areal-like resume {folder.root}")
        elif outcome.status != "completed" and outcome.reason != str(error):
            console.print(outcome.reason)
        if isinstance(error, ProcessDied):
            console.print(f"--- end of {folder.logs / (error.name + '.log')}")
            console.print(printable(error.tail))
        if error is not None:
            raise error
        return EXIT_STATUS[outcome.status]


def _meeting_place(folder: Path) -> str:
    """Where the trainer's ranks find each other: a file that only this user can open; another one each time they start.

    On a cluster the first one's seat finds a port of its own node instead.
    """
    return f"file://{folder / secrets.token_hex(8)}"


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A temporary folder with file locks, which the file system of the run folder may lack.

    In shared memory where there is any: TMPDIR may be on a network file system too.
    """
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="areal_like-ranks-", dir=place))
    claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """The controller's own log, alongside those of its processes; the screen belongs to the display."""
    handler, root = logging.FileHandler(path, encoding="utf-8"), logging.getLogger()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s controller %(name)s: %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


def _audit_words(folder: RunFolder) -> str:
    try:
        report = audit(folder.root)
    except (UserError, LedgerError) as error:
        return f"not possible: {error}"
    return "clean" if not report.findings else "; ".join(str(finding) for finding in report.findings[:5])
