"""The dashboard of `metrics.dashboard`: the command of that name as a child process, which ends with the session.

The pages are in controller/dashboard/, which this module only starts. No part of a run waits for it: a thread starts
it, with low priority, and passes on what it prints. Its failure is one warning, and the run continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from areal_like.guard import tied

NICENESS = 10
ADDRESS_LINE, TOKEN_LINE = "dashboard of ", "token for actions "
"""Starts of the lines that the command prints for a run to show; controller/dashboard/command.py writes them."""
_HOME = Path(__file__).resolve().parents[2]
Say = Callable[[str, Literal["info", "warning"]], None]


class DashboardProcess:
    """Starts and ends the process. The constructor returns at once.

    Args:
        runs_dir: the folder of runs to serve.
        port: port on loopback; 0 takes any free one.
        say: called on the running event loop with each line that the dashboard prints, and with its failure.
    """

    def __init__(self, runs_dir: Path, port: int, say: Say) -> None:
        self._command = _command(runs_dir, port)
        self._port, self._say, self._loop = port, say, asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._is_ended = False
        # The child is tied to the thread that starts it, so the thread stays until the child has exited.
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Request the process to exit, without waiting for it."""
        with self._lock:
            self._is_ended = True
            if self._child is not None:
                self._child.terminate()

    def join(self, timeout_s: float) -> bool:
        """Wait for the process; return whether it has exited."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------ in the thread

    def _follow(self) -> None:
        try:
            with self._lock:
                if self._is_ended:
                    return
                child = self._child = _start(self._command)
        except OSError as error:
            self._pass_on(f"no dashboard: {error}; the run continues", "warning")
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
        assert child.stdout is not None
        last = ""
        for line in child.stdout:
            last = line.strip() or last
            if last.startswith((ADDRESS_LINE, TOKEN_LINE)):
                self._pass_on(last, "info")
        status = child.wait()
        if not self._is_ended:
            self._pass_on(f"no dashboard: {self._reason(status, last)}; the run continues", "warning")

    def _reason(self, status: int, last: str) -> str:
        if f"port {self._port} is in use" in last:
            remedy = "set metrics.dashboard_port to a different port, or to 0 for any free port"
            return f"port {self._port} is in use: {remedy}"
        return last or f"exit status {status}"

    def _pass_on(self, line: str, level: Literal["info", "warning"]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the session has ended
            self._loop.call_soon_threadsafe(self._show, line, level)

    def _show(self, line: str, level: Literal["info", "warning"]) -> None:
        if not self._is_ended:
            self._say(line, level)


@contextmanager
def dashboard_process(is_wanted: bool, runs_dir: Path, port: int, say: Say) -> Iterator[None]:
    """Serve the folder of runs, if wanted, until the context ends."""
    process = DashboardProcess(runs_dir, port, say) if is_wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.end()


def _command(runs_dir: Path, port: int) -> Sequence[str]:
    return tied([sys.executable, "-P", "-m", "controller", "dashboard", str(runs_dir), "--port", str(port)])


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(_HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
