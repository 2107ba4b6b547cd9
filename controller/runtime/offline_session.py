"""One session of a run from files: its process, its reports, its end.

Starts the process, follows metrics.jsonl (which the process writes), and updates status.json and sinks. The folder and
the command are in cli/offline_jobs.py, training in trainer/offline.

Map. `_follow` polls every POLL_S: it reads the new lines of metrics.jsonl, passes them to the view, and ends when the
process has exited. A signal requests the process to exit after its current step; a second one kills it immediately.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import OperationError, ProcessDied, UserError
from areal_like.process import DIVERGED, USER_MISTAKE, last_error
from controller.config.offline_config import Objective, OfflineConfig
from controller.launch.launcher import Exit, tail_of
from controller.launch.local import LocalLauncher, child_environment
from controller.ledger.run_lock import lock_folder
from controller.report.at_end import draw_report
from controller.run_folder.run_folder import RunFolder, Status
from controller.runtime.signals import Signals
from controller.telemetry.display import Display
from controller.telemetry.offline_view import OfflineView
from controller.telemetry.opening import open_sinks
from controller.telemetry.screen import Screen
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import write_summary
from controller.telemetry.summary_page import print_summary
from controller.wiring.offline import OFFLINE, offline_spec

POLL_S = 0.2
END_GRACE_S = 2.0
SINK_GRACE_S = 5.0
PROCESS = "trainer"


class OfflineSession:
    """One session, from start or resume to its end."""

    def __init__(self, config: OfflineConfig, folder: RunFolder, objective: Objective) -> None:
        self._config, self._folder, self._objective = config, folder, objective
        self._launcher = LocalLauncher(folder.logs)
        self._num_signals = 0

    async def run(self) -> int:
        """Run the session; return the exit status. Raises UserError, OperationError; the result is also in
        state.json.
        """
        lock = lock_folder(self._folder.root)
        try:
            with Signals() as signals, Display(self._config.metrics.display) as display:
                signals.hand_to(self._on_signal)
                end, summary = await self._run(display)
            await self._conclude(end, summary)
            return 0
        finally:
            os.close(lock)

    async def _run(self, display: Display) -> tuple[Status, Mapping[str, Any]]:
        folder, run_id = self._folder, str(self._folder.read_state()["run_id"])
        display.note(f"run {folder.name}: {folder.root}")
        status = StatusFile(folder.status, run=folder.name, num_steps=0)
        try:
            sinks = open_sinks(self._config, folder, run_id, display.note)
            view = OfflineView(display, status, sinks)
            try:
                await self._start(run_id)
                end = self._judge(await self._follow(view), view)
            finally:
                await self._launcher.stop_all(END_GRACE_S)
                view.close(SINK_GRACE_S)
        except BaseException as error:
            status.end("failed")
            folder.write_state("failed", reason=str(error))
            raise
        summary = view.summary(end)
        write_summary(folder.summary, summary)
        status.end(end)
        folder.write_state(end)
        return end, summary

    async def _conclude(self, end: Status, summary: Mapping[str, Any]) -> None:
        """After the display has ended, print summary, report, and next steps."""
        root, screen = self._folder.root, Screen()
        print_summary(summary, root, screen)
        if self._config.metrics.report:
            screen.print(await asyncio.to_thread(draw_report, root))
        if end == "stopped":
            screen.print(f"continue with: areal-like resume {root}")

    def _on_signal(self, name: str) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._launcher.terminate(PROCESS)
        else:
            self._launcher.kill(PROCESS)

    async def _start(self, run_id: str) -> None:
        spec = offline_spec(self._config, self._folder, self._objective, run_id)
        path = self._folder.processes / f"{PROCESS}.json"
        spec.save(path)
        environment = child_environment(spec.num_threads, user_path=self._launcher.user_path)
        self._log_start = _size(self._launcher.log_of(PROCESS))
        self._metrics_start = _size(self._folder.metrics)
        await self._launcher.start(PROCESS, ["-m", OFFLINE, "--spec", str(path)], environment)
        if self._num_signals:  # received before the process was started
            self._launcher.terminate(PROCESS)

    async def _follow(self, view: OfflineView) -> Exit:
        """Follow until the process has exited and all its rows were processed."""
        with closing(_new_rows(self._folder.metrics, self._metrics_start)) as rows:
            while True:
                ended = next((one for one in self._launcher.reap() if one.name == PROCESS), None)
                while (row := next(rows)) is not None:
                    view.take(row)
                if ended is not None:
                    return ended
                view.look(self._launcher.pid_of(PROCESS), self._launcher.rss_mb_of(PROCESS))
                await asyncio.sleep(POLL_S)

    def _judge(self, ended: Exit, view: OfflineView) -> Status:
        if ended.returncode == 0:
            return "finished" if view.is_complete and self._folder.final.is_dir() else "stopped"
        if self._num_signals and ended.returncode < 0:  # killed before it could handle the signal, or by the second one
            return "stopped"
        tail = tail_of(self._launcher.log_of(PROCESS), start=self._log_start)
        if ended.returncode == USER_MISTAKE:
            raise UserError(last_error(tail) or "the run cannot begin")
        if ended.returncode == DIVERGED:
            raise OperationError(last_error(tail))
        raise ProcessDied(PROCESS, ended.returncode, tail)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _new_rows(path: Path, start: int) -> Generator[dict[str, Any] | None, None, None]:
    """Rows of a JSON Lines file from byte `start` on, as they arrive; None each time that there is no further line."""
    rest = b""
    while not path.is_file():
        yield None
    with path.open("rb") as file:
        file.seek(start)
        while True:
            rest += file.read()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                try:
                    row = msgspec.json.decode(line)
                except msgspec.DecodeError:  # truncated by a crash
                    continue
                if isinstance(row, dict):
                    yield row
            yield None
