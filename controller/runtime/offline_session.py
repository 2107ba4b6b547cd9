"""One session of a run from files: its processes, its reports, its end.

Starts one process for each rank, follows metrics.jsonl (which rank 0 writes), and updates status.json and sinks. The
folder and the command are in cli/offline_jobs.py, training in trainer/offline.

Map. `_follow` polls every POLL_S: it reads the new lines of metrics.jsonl, passes them to the view, and ends when the
processes have exited. If one fails, the others get LOST_GRACE_S to exit, since the loss of a rank is noticed by each.
A signal requests rank 0 to exit after its current step, with the others; a second one kills all immediately.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import OperationError, ProcessDied, UserError
from areal_like.process import DIVERGED, USER_MISTAKE, last_error
from controller.config.offline_config import Objective, OfflineConfig
from controller.launch.environments import child_environment
from controller.launch.launcher import Exit, tail_of
from controller.launch.local import LocalLauncher
from controller.ledger.run_lock import lock_folder
from controller.report.at_end import draw_report
from controller.run_folder.run_folder import RunFolder, Status
from controller.runtime.signals import Signals
from controller.runtime.storage import rendezvous_address, rendezvous_folder
from controller.telemetry.dashboard_process import dashboard_process
from controller.telemetry.display import Display
from controller.telemetry.offline_view import OfflineView
from controller.telemetry.opening import open_sinks
from controller.telemetry.screen import Screen
from controller.telemetry.status import StatusFile
from controller.telemetry.summary import write_summary
from controller.telemetry.summary_page import print_summary
from controller.wiring.offline import OFFLINE, offline_spec, rank_names

POLL_S = 0.2
END_GRACE_S = 2.0
LOST_GRACE_S = 10.0
PROCESS = "trainer"
RANK_LOST = "RankLost"
"""Beginning of the last error of a rank that only reports the loss of another one."""


class OfflineSession:
    """One session, from start or resume to its end."""

    def __init__(self, config: OfflineConfig, folder: RunFolder, objective: Objective) -> None:
        self._config, self._folder, self._objective = config, folder, objective
        self._launcher = LocalLauncher(folder.logs)
        self._names = rank_names(config)
        self._log_starts: dict[str, int] = {}
        self._num_signals = 0

    async def run(self) -> int:
        """Run the session; return the exit status. Raises UserError, OperationError; the result is also in
        state.json.
        """
        lock = lock_folder(self._folder.root)
        try:
            with Signals() as signals, Display(self._config.metrics.display) as display:
                signals.hand_to(self._on_signal)
                metrics, runs_dir = self._config.metrics, self._folder.root.parent
                with dashboard_process(metrics.dashboard, runs_dir, metrics.dashboard_port, display.note):
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
            end: Status = "failed"
            with rendezvous_folder() as meeting:
                try:
                    await self._start(run_id, rendezvous_address(meeting))
                    end = self._judge(await self._follow(view), view)
                finally:
                    await self._launcher.stop_all(END_GRACE_S)
                    view.close(end)
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
            for name in self._names:
                self._launcher.kill(name)

    async def _start(self, run_id: str, address: str) -> None:
        self._metrics_start = _size(self._folder.metrics)
        for rank, name in enumerate(self._names):
            spec = offline_spec(self._config, self._folder, self._objective, run_id, rank=rank, address=address)
            path = self._folder.processes / f"{name}.json"
            spec.save(path)
            environment = child_environment(spec.num_threads, user_path=self._launcher.user_path)
            self._log_starts[name] = _size(self._launcher.log_of(name))
            await self._launcher.start(name, ["-m", OFFLINE, "--spec", str(path)], environment)
        if self._num_signals:  # received before the process was started
            self._launcher.terminate(PROCESS)

    async def _follow(self, view: OfflineView) -> list[Exit]:
        """Follow until all processes have exited and all rows were processed."""
        ended: list[Exit] = []
        lost_s: float | None = None
        with closing(_new_rows(self._folder.metrics, self._metrics_start)) as rows:
            while True:
                ended += [one for one in self._launcher.reap() if one.name in self._names]
                while (row := next(rows)) is not None:
                    view.take(row)
                if len(ended) == len(self._names):
                    return ended
                if any(one.returncode for one in ended):
                    lost_s = time.monotonic() if lost_s is None else lost_s
                    if time.monotonic() - lost_s > LOST_GRACE_S:
                        return ended  # the others are killed
                view.look(self._launcher.pid_of(PROCESS), self._launcher.rss_mb_of(PROCESS))
                await asyncio.sleep(POLL_S)

    def _judge(self, exits: Sequence[Exit], view: OfflineView) -> Status:
        failed = [one for one in exits if one.returncode]
        if not failed:
            return "finished" if view.is_complete and self._folder.final.is_dir() else "stopped"
        # killed before it could handle the signal, or by the second one
        if self._num_signals and any(one.returncode < 0 and one.expected for one in failed):
            return "stopped"
        tails = {one.name: tail_of(self._launcher.log_of(one.name), start=self._log_starts[one.name]) for one in failed}
        causes = [one for one in failed if not last_error(tails[one.name]).startswith(RANK_LOST)]
        ended = (causes or failed)[0]
        tail = tails[ended.name]
        if ended.returncode == USER_MISTAKE:
            raise UserError(last_error(tail) or "the run cannot start")
        if ended.returncode == DIVERGED:
            raise OperationError(last_error(tail))
        raise ProcessDied(ended.name, ended.returncode, tail)


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
