"""The child process that runs a job for the Python API: `areal-like COMMAND ...`. It is killed when its caller exits.

Starts the process, finds its run folder, collects its output and converts its exit status to an exception.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from areal_like.errors import RunFailed, UserError
from areal_like.guard import guarded
from areal_like.import_check import HOME
from areal_like.process import describe_status
from controller.run_folder.run_folder import FOLDER_FILE, RunFolder

CONFIG = "\0config"
"""Placeholder among the arguments for the file with `config_text`."""
POLL_S = 0.1
USER_ERROR, INTERRUPTED = 2, 130


def start(arguments: Sequence[str], *, config_text: str | None = None) -> ControllerProcess:
    """Start `areal-like` with these arguments and wait until its run folder exists. Raises UserError, RunFailed."""
    process = ControllerProcess(arguments, config_text)
    try:
        process.wait_for_folder()
    except BaseException:
        process.kill()
        raise
    return process


class ControllerProcess:
    """A controller that is killed when this process exits for any reason."""

    def __init__(self, arguments: Sequence[str], config_text: str | None) -> None:
        self._folder: RunFolder | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="areal_like-", ignore_cleanup_errors=True)
        root = Path(self._scratch.name)
        self._announcement, self._output, self._config = root / "folder", root / "output.txt", root / "config.yaml"
        if config_text is not None:
            self._config.write_text(config_text, encoding="utf-8")
        words = [str(self._config) if word == CONFIG else word for word in arguments]
        environment = dict(os.environ)
        inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(HOME), *inherited]))
        environment[FOLDER_FILE] = str(self._announcement)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                guarded([sys.executable, "-P", "-m", "controller", *words]),
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def folder(self) -> RunFolder:
        """Folder of the run."""
        assert self._folder is not None, "wait_for_folder comes first"
        return self._folder

    @property
    def output(self) -> str:
        """Output of the command so far."""
        try:
            return self._output.read_text(errors="replace")
        except OSError:
            return ""

    @property
    def is_alive(self) -> bool:
        """Return whether it has not exited."""
        return self._process.poll() is None

    def wait_for_folder(self) -> None:
        """Wait until the run's folder exists. Raises like `check` if the command exits before."""
        while self._folder is None:
            has_ended = self.wait(POLL_S)
            with contextlib.suppress(FileNotFoundError):
                self._folder = RunFolder(Path(self._announcement.read_text()))
            if has_ended and self._folder is None:
                self.check()
                raise RunFailed("areal-like", "the controller exited before it created the run's folder")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has exited, at most the given time; return whether it has."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def check(self) -> None:
        """If the command has exited with an error, raise it as UserError or RunFailed."""
        status = self._process.poll()
        if status in (None, 0, INTERRUPTED):
            return
        lines = [line.removeprefix("error: ") for line in self.output.splitlines() if line.startswith("error: ")]
        text = "\n".join(lines).replace(str(self._config), "config")
        if status == USER_ERROR and text:
            raise UserError(text)
        name = self._folder.name if self._folder is not None else "areal-like"
        last = (self.output.strip().splitlines() or [""])[-1]
        raise RunFailed(name, text or f"the controller ended with {describe_status(status)}: {last}")

    def kill(self) -> None:
        """Kill it and all processes of its run."""
        self._process.kill()
        self._process.wait()
