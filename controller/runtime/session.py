"""One session of a run in this process: from the lock on its folder to summary and exit status.

Opens and closes all resources of a session. New and resumed runs are distinguished in cli/jobs.py, components are made
in composition.py, samples are handled by server and coordinator, processes are started in launch/, the final output is
in conclusion.py.

Opened in this order, closed in reverse order:

1. Ledger: the lock on the run's folder. Nothing in the folder is changed before.
2. Log file, status file, signals, display, journal, metrics sinks.
3. Launcher. From here on a signal ends the session, until the server handles signals.
4. Starting model; weight folder in shared memory.
5. Hub; rendezvous folder of the trainer's ranks.
6. Supervised processes, then the server's loops (map in server.py). `RunEnd` ends them.

The end is the same in all cases: the server notifies the processes and they finish, the hub is closed, the launcher
stops the remaining processes, sinks write their queues, the status file records how the run ended; then the exit stack
releases folders and shared memory, and closes the ledger last. Summary and trace are written after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_like.errors import OperationError, UserError
from areal_like.plain_text import LineFormatter
from areal_like.transport.channel import Hub
from areal_like.transport.credentials import make_run_credentials
from areal_like.weights.weight_store import WeightStore
from controller.config.run_config import RunConfig
from controller.coordinator.events import Event, Published, RunStarted
from controller.data.job_rows import JobRows
from controller.launch.choice import launcher_for
from controller.launch.launcher import Launcher
from controller.ledger.ledger import Ledger
from controller.ledger.mirror import LedgerHome
from controller.ledger.sample_sources import SampleSources
from controller.preflight.called_models import check_tokenizers
from controller.preflight.reward_services import check_services
from controller.run_folder.run_folder import DamagedState, RunFolder
from controller.run_folder.seal import break_seal
from controller.runtime import storage
from controller.runtime.composition import ProcessStarter, compose, invite, make_hub, make_supervisor, server_settings
from controller.runtime.conclusion import RUN_STATUS, SessionResult, conclude, count_run
from controller.runtime.continuity import check_continuity
from controller.runtime.model_preparation import Prepared, prepare, prepare_process
from controller.runtime.open_session import OpenSession
from controller.runtime.outcome import Outcome, RunEnd
from controller.runtime.server import Server
from controller.runtime.signals import Signals
from controller.runtime.starting_point import StartingPoint, find_start, restore_tally
from controller.telemetry.answer_signs import AnswerSigns
from controller.telemetry.dashboard_process import dashboard_process
from controller.telemetry.display import Display
from controller.telemetry.eval_values import EvalValues
from controller.telemetry.hacking_watch import HackingWatch
from controller.telemetry.journal import Journal, rows_of
from controller.telemetry.opening import open_sinks
from controller.telemetry.sinks import Sinks
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import Tally
from controller.telemetry.telemetry import Telemetry
from controller.wiring.process_specs import Addresses, reward_names

FAREWELL_S = 10.0
FAILED_GRACE_S = 5.0
"""Time for processes of a failed run to exit: nothing is left to save."""


@dataclass(frozen=True)
class RunSession:
    """One session of a run. Call `run` once."""

    config: RunConfig
    folder: RunFolder
    rows: JobRows
    is_resume: bool = False
    is_evaluation: bool = False
    accept_loss: bool = False
    """Continue although files of the run are missing or older than others (continuity.py)."""

    async def run(self) -> int:
        """Run to the end; print the summary and return the exit status. Raises the error that ended it."""
        started_s = time.monotonic()
        result = SessionResult(Outcome("failed", "ended by an error in the controller"))
        launcher = launcher_for(self.config, self.folder)
        with contextlib.ExitStack() as stack:
            session = self._open(launcher, stack)
            try:
                session = self._with_sinks(session)
                result = await self._serve(session)
            except (UserError, OperationError, OSError) as error:
                result = SessionResult(Outcome.of(error))
            finally:
                await self._end_processes(session, result.outcome)
        return conclude(session, result, time.monotonic() - started_s)

    # ------------------------------------------------------------ open

    def _open(self, launcher: Launcher, stack: contextlib.ExitStack) -> OpenSession:
        """Open everything except the metrics sinks, whose errors are recorded as the run's. Raises UserError if another
        controller has the run.
        """
        folder, run_id = self.folder, self._run_id()
        home = storage.open_ledger_home(self.config, folder, run_id, stack)
        ledger = stack.enter_context(
            storage.open_ledger(
                self.config, folder, run_id, home, is_resume=self.is_resume, accept_loss=self.accept_loss
            )
        )
        if self.is_resume:
            self._check_continuity(ledger, run_id, home)
        break_seal(folder)
        folder.write_state("running")
        stack.enter_context(_logging_to(folder.logs / "controller.log"))
        status = StatusFile(folder.status, run=folder.name, num_steps=self.config.num_steps)
        status.write("preparing")
        signals = stack.enter_context(Signals())
        display = stack.enter_context(Display(self.config.metrics.display))
        signals.say = display.note
        metrics, is_served = self.config.metrics, self.config.metrics.dashboard and not self.is_evaluation
        stack.enter_context(dashboard_process(is_served, folder.root.parent, metrics.dashboard_port, display.note))
        journal = stack.enter_context(contextlib.closing(Journal(folder.metrics)))
        sources = SampleSources(self.rows.source)
        tally = Tally(
            layout=self.rows.layout, solved_value=self.config.eval.solved_value, sources=sources,
            signs=AnswerSigns(self.config.held_out_scorers), values=EvalValues(self.config.held_out_scorers),
        )  # fmt: skip
        if self.config.emulation is None:  # on emulated devices rewards are meaningless

            def name(kind: str, words: str) -> None:
                journal.measure("note", note=kind, text=words)
                display.note(words, "warning")

            watch = HackingWatch(folder, name, eval_every_steps=self.config.eval.every_steps)
            watch.restore(rows_of(folder.metrics, "step", "eval", "eval_values", "note"))
            journal.listen(watch)
        return OpenSession(
            config=self.config,
            folder=folder,
            run_id=run_id,
            rows=self.rows,
            is_evaluation=self.is_evaluation,
            launcher=launcher,
            ledger=ledger,
            ledger_home=home,
            telemetry=Telemetry(display, journal, status, tally, Sinks([])),
            signals=signals,
            end=RunEnd(),
            stack=stack,
        )

    def _with_sinks(self, session: OpenSession) -> OpenSession:
        """Open the metrics sinks of the session. Raises UserError."""
        sinks = open_sinks(self.config, self.folder, session.run_id, session.note)
        session.telemetry.journal.listen(sinks)
        return replace(session, telemetry=replace(session.telemetry, sinks=sinks))

    def _run_id(self) -> str:
        if not (run_id := self.folder.read_state().get("run_id")):
            raise DamagedState(
                "the file contains no run ID", where=str(self.folder.state), remedy="restore the file from a backup"
            )
        return str(run_id)

    def _check_continuity(self, ledger: Ledger, run_id: str, home: LedgerHome | None) -> None:
        """Raise UserError if the run's files are inconsistent. A mirror may be older than the run."""
        check_continuity(
            self.folder, ledger, run_id,
            accept_loss=self.accept_loss,
            is_mirror=home is not None and home.is_restored,
            say=lambda words: print(f"warning: {words}", file=sys.stderr),
        )  # fmt: skip

    # ------------------------------------------------------------ serve

    async def _serve(self, session: OpenSession) -> SessionResult:
        """Run from the first note to the exit of the last process."""
        await self._greet(session)
        storage.sweep_dead_folders()
        async with self._status_of_preparing(session):  # a cluster may have no room for minutes
            is_open = await session.signals.unless_asked(session.launcher.open(session.note))
        if not is_open:
            return SessionResult(Outcome("stopped", "before the first step"))
        published_to = storage.open_weight_folder(session, self.folder.root / "model") if self.is_evaluation else None
        prepared = await self._prepare(session, published_to)
        if prepared is None:
            return SessionResult(Outcome("stopped", "before the first step"))
        check_tokenizers(self.config, prepared.model_dir)
        weight_dir = published_to or storage.open_weight_folder(session, prepared.model_dir)
        start = self._start(session)
        make_run_credentials(self.folder.keys)
        hub = make_hub(session)
        hub_address = await hub.start()
        try:
            return await self._run_server(session, start, hub, hub_address, prepared, weight_dir)
        finally:
            await hub.close()

    async def _greet(self, session: OpenSession) -> None:
        """Display the run and its services. Raises the error of a service that cannot be used."""
        session.note(f"run {self.folder.name}: {self.folder.root}")
        if self.config.reward.addresses:
            for line in await check_services(self.config):
                session.note(line)

    async def _prepare(self, session: OpenSession, published_to: Path | None) -> Prepared | None:
        """Prepare the starting model; None if a signal arrived first. An evaluation's model is published immediately,
        as version 0.
        """
        display, launcher = session.telemetry.display, session.launcher
        preparing = prepare(
            self.config, self.folder, launcher, display,
            publish_to=published_to, out_dir=storage.evaluated_model(session) if self.is_evaluation else None,
        )  # fmt: skip
        async with self._status_of_preparing(session):
            return await session.signals.unless_asked(preparing)

    @staticmethod
    def _status_of_preparing(session: OpenSession) -> AbstractAsyncContextManager[None]:
        """Context manager: status.json is written once a second."""
        display, launcher = session.telemetry.display, session.launcher
        return session.telemetry.status.preparing(lambda: display.progress_text, lambda: prepare_process(launcher))

    def _start(self, session: OpenSession) -> StartingPoint:
        """Find where earlier sessions ended; the totals continue from there."""
        start, ledger = StartingPoint(session.ledger.load()), session.ledger
        if not self.is_evaluation:
            start = find_start(
                self.folder, ledger, start.state, session.telemetry.display,
                is_resume=self.is_resume, accept_loss=self.accept_loss,
            )  # fmt: skip
        restore_tally(session.telemetry.tally, ledger, start, self.folder.metrics)
        return start

    async def _run_server(
        self,
        session: OpenSession,
        start: StartingPoint,
        hub: Hub,
        hub_address: str,
        prepared: Prepared,
        weight_dir: Path,
    ) -> SessionResult:
        """Make the components, start the processes, serve until the run is over, shut down, and count."""
        rewards = tuple([await session.launcher.address_for(name) for name in reward_names(self.config)])
        rendezvous = session.stack.enter_context(storage.rendezvous_folder())
        new_address = functools.partial(storage.rendezvous_address, rendezvous)
        addresses = Addresses(hub_address, rewards, weight_dir, self.folder.keys, new_address())
        invite(session, hub_address)
        processes = ProcessStarter(
            self.config, self.folder, make_supervisor(session, hub), addresses,
            run_id=session.run_id, model_dir=prepared.model_dir, lineage=start.lineage,
        )  # fmt: skip
        processes.add_all(start.checkpoint, has_trainer=not self.is_evaluation)
        components = compose(session, start, hub, processes, new_address)
        server = Server(server_settings(self.config), components)
        session.signals.hand_to(server.request_stop)
        async with storage.mirrored(session, lambda: server.saved_version):
            outcome = await server.run(self._first_events(start, weight_dir))
            await server.farewell(FAREWELL_S)
        counts = count_run(session, components.coordinator, start) | components.watch.facts()
        return SessionResult(outcome, counts, prepared.wall_s)

    def _first_events(self, start: StartingPoint, weight_dir: Path) -> list[Event]:
        """The first events of the coordinator. An evaluation has no trainer that publishes its version."""
        events: list[Event] = [RunStarted(lineage=start.lineage, checkpoint_version=start.version)]
        if self.is_evaluation:
            manifest = WeightStore(weight_dir, self.config.trainer.weights.layout, keep=2).newest()
            events.append(Published(version=0, lineage=start.lineage, manifest_path=str(manifest)))
        return events

    # ------------------------------------------------------------ close

    async def _end_processes(self, session: OpenSession, outcome: Outcome) -> None:
        """Stop running processes, close the sinks, record how the run ended."""
        grace_s = FAILED_GRACE_S if outcome.status == "failed" else self.config.launch.stop_grace_s
        await session.launcher.stop_all(grace_s, lambda: session.end.is_hurried)
        await session.launcher.close()
        ending = {"kind": "end", "time_s": time.time(), "status": outcome.status, "reason": outcome.reason}
        session.telemetry.sinks.offer(ending)
        await self._close_sinks(session)
        session.telemetry.status.end(RUN_STATUS[outcome.status])
        self.folder.write_state(RUN_STATUS[outcome.status], reason=outcome.reason)

    async def _close_sinks(self, session: OpenSession) -> None:
        """Close the sinks: rows that a sink has not written within its grace period are lost and counted."""
        close = functools.partial(
            session.telemetry.sinks.close, session.telemetry.display.note, is_hurried=lambda: session.end.is_hurried
        )
        for news in await asyncio.to_thread(close):
            with contextlib.suppress(OSError):  # a full disk may be the reason of the end
                session.telemetry.journal.measure("sink", **news.facts())
        for row in session.telemetry.sinks.take_rows():
            with contextlib.suppress(OSError):
                session.telemetry.journal.append(row)


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Log the controller to its own file, next to those of its processes; the terminal is used by the display."""
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
