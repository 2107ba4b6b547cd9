"""Processes of tests, forked from one that has imported what they need (areal_like/forkserver.py).

Importing torch, transformers and DeepSpeed takes seconds of a core, which is more than most of these processes compute.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
WAIT_S = 550.0
"""Generous: it only bounds a hang."""


class ForkedJob:
    """One process. Its methods are those of subprocess.Popen."""

    def __init__(self, server: JobServer, pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def returncode(self) -> int | None:
        """As far as the server has reported; negative for a signal."""
        return self._server.statuses.get(self.pid)

    def poll(self) -> int | None:
        self._server.receive(0.0)
        return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        """How it ended. Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + timeout
        while (status := self.returncode) is None:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._server.receive(left_s)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class JobServer:
    """Its starter's side of a fork server that has imported `modules`; `folder` is on its path."""

    def __init__(self, modules: Sequence[str], folder: Path) -> None:
        path = os.pathsep.join([str(REPOSITORY), str(folder)])
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.statuses: dict[int, int] = {}
        """By pid, of those that have ended."""
        self._answers: list[dict[str, Any]] = []
        self._unread = b""
        self._stream, theirs = socket.socketpair()
        words = ["--starter", str(os.getpid()), *modules]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "areal_like.forkserver", *words], env=self.environment, stdin=theirs
            )
        self._answer("ready")

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        folder: Path = REPOSITORY,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedJob:
        """Run `module` as `__main__` in `folder`; what it prints is in `log`."""
        request: Mapping[str, Any] = {
            "module": module, "arguments": list(arguments), "environment": dict(environment or self.environment),
            "folder": str(folder), "log": str(log), "title": f"{sys.executable} -P -m {module} {' '.join(arguments)}",
        }  # fmt: skip
        self._stream.sendall(json.dumps(request).encode() + b"\n")
        return ForkedJob(self, int(self._answer("pid")))

    def receive(self, timeout_s: float) -> None:
        """Take in what the server says within that time."""
        self._stream.settimeout(timeout_s)
        try:
            data = self._stream.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return
        assert data, f"the fork server ended with {self._process.wait(300.0)}"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "ended" in said:
                self.statuses[said["ended"]] = said["status"]
            else:
                self._answers.append(said)

    def _answer(self, key: str) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while not self._answers:
            assert time.monotonic() < deadline_s, "the fork server does not answer"
            self.receive(deadline_s - time.monotonic())
        return self._answers.pop(0)[key]

    def close(self) -> None:
        """End it, and with it all that still run."""
        self._stream.close()
        self._process.kill()
        self._process.wait(300.0)
