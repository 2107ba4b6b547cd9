"""Experiment trackers (Weights & Biases, MLflow, Trackio), each in a separate process connected by a pipe.

A sink sends one row and waits for its acknowledgement, for at most ANSWER_S. The packages are imported in *_process.py.

Why a process: these packages start threads and services, and wait for uploads when the interpreter exits. A process
that hangs is killed, and the run's controller imports none of them. The process ends when the pipe closes, also if the
controller is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_like.errors import OperationError
from areal_like.guard import guarded
from areal_like.guarded_process import end_guarded
from areal_like.metrics import encode
from areal_like.process import last_error
from controller.launch.environments import child_environment
from controller.launch.launcher import tail_of
from controller.telemetry.answers_table import answers_table
from controller.telemetry.scalars import AXES, scalars
from controller.telemetry.sink_kinds import is_installed
from controller.telemetry.sinks import absent

ANSWER_S = 60.0
"""Timeout of one row, and of the start, in which a service is started or a server is contacted."""
FINISH_S = 60.0


class TrackerSink:
    """Sends rows to `python -m MODULE` as JSON lines, each of which is acknowledged by its number. Subclasses name the
    package."""

    name: str
    """Name of the sink and of the package."""
    module: str
    """Module that is run as a process; it calls tracker_process.serve."""
    environment: Mapping[str, str] = MappingProxyType({})
    kinds = frozenset(AXES)
    grace_s = FINISH_S
    """These packages take seconds to start, MLflow also to create its database, and upload what is left at the end."""

    def __init__(self, start: Mapping[str, Any], log_path: Path, *, remedy: str) -> None:
        """`start`: argument of the module's `begin`. Raises UserError if the package is not installed."""
        if not is_installed(self.name):
            raise absent(self.name, remedy)
        self._start, self._log_path = dict(start), log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._num_sent = 0
        self._answers = b""

    def write(self, record: Mapping[str, Any]) -> None:
        """Send one row and wait for its acknowledgement. Raises OperationError."""
        found = scalars(record)
        if found is None:
            return
        if self._process is None:
            self._process = self._spawn()
            self._send({"start": self._start})
        self._send({"row": {found.axis: found.at, "_timestamp": found.time_s, **found.values}})
        if (table := answers_table(record)) is not None:
            self._send({"table": table})

    def close(self) -> None:
        """Let the process finish, which may include uploads; kill it after FINISH_S."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(FINISH_S)
        finally:
            end_guarded(process)  # and the service that wandb starts in its own session

    # ------------------------------------------------------------ inside

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                guarded([sys.executable, "-P", "-m", self.module]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self.environment, **child_environment(1, user_path=Path.cwd())},
                start_new_session=True,  # Ctrl-C is for the controller
            )

    def _send(self, message: Mapping[str, Any]) -> None:
        process, self._num_sent = self._process, self._num_sent + 1
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(encode(message) + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise OperationError(self._why_gone()) from error
        deadline_s = time.monotonic() + ANSWER_S
        while (answer := self._answer(deadline_s)).get("done") != self._num_sent:  # a late answer to an earlier row
            if error_text := answer.get("error"):
                raise OperationError(str(error_text))

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._answers:
            if not select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise OperationError(f"{self.name} did not respond for {ANSWER_S:g} s")
            chunk = os.read(pipe, 65536)
            if not chunk:
                raise OperationError(self._why_gone())
            self._answers += chunk
        line, _, self._answers = self._answers.partition(b"\n")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _why_gone(self) -> str:
        tail = tail_of(self._log_path)
        return f"the process of the sink ended: {last_error(tail) or tail.rpartition(chr(10))[2] or 'no output'}"


class WandbSink(TrackerSink):
    """Weights & Biases."""

    name, module = "wandb", "controller.telemetry.wandb_process"
    environment = MappingProxyType({"WANDB_ERROR_REPORTING": "false"})


class MlflowSink(TrackerSink):
    """MLflow."""

    name, module = "mlflow", "controller.telemetry.mlflow_process"


class TrackioSink(TrackerSink):
    """Trackio."""

    name, module = "trackio", "controller.telemetry.trackio_process"
