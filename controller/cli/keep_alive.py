"""`--keep-alive`: runs `train` or `resume` in a child process, and resumes the run if the child dies.

The child is the controller. It is resumed if it was killed, failed, or has written no status for SILENT_POLLS, and not
if it ended by itself with one of FINAL: done, stopped, a user error, Ctrl-C. The failures in a row without a finished
step in between are limited. See docs/decisions/0145-keep-alive.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.plain_text import printable
from areal_like.process import USER_MISTAKE, describe_status
from controller.run_folder.restarts import record_restart
from controller.run_folder.run_folder import FOLDER_FILE, RunFolder, is_resumable
from controller.runs.facts import tail_rows

INTERRUPTED = 130
FINAL = (0, USER_MISTAKE, INTERRUPTED)
POLL_S = 1.0
SILENT_POLLS = 300
"""Polls without a new status.json after which a controller counts as hung: it is written about once a second."""
MAX_PAUSE_S = 60.0

Spawn = Callable[[Sequence[str], Path], "subprocess.Popen[bytes]"]


def spawn(words: Sequence[str], announcement: Path) -> subprocess.Popen[bytes]:
    """Start `areal-like WORDS` with this process's terminal; it writes its run folder to `announcement`."""
    environment = {**os.environ, FOLDER_FILE: str(announcement)}
    return subprocess.Popen([sys.executable, "-P", "-m", "controller", *words], env=environment)


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The command line of `train` or `resume` without the options of `--keep-alive`."""
    if arguments.command == "train":
        return ["train", arguments.config, *arguments.overrides]
    options = [f"--{name.replace('_', '-')}" for name in ("accept_loss", "past_early_stop") if getattr(arguments, name)]
    return ["resume", arguments.run, *options]


class KeepAlive:
    """One command with its restarts.

    Args:
        words: the command line without `--keep-alive`.
        budget: failures in a row, without a finished step in between, after which it gives up.
    """

    def __init__(
        self, words: Sequence[str], budget: int, *, spawn: Spawn = spawn, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._words, self._budget = list(words), budget
        self._spawn, self._sleep = spawn, sleep
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: RunFolder | None = None
        self._is_stopped = False

    def run(self) -> int:
        """Run until it ends by itself, is stopped, or the budget is used up; return the exit status."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with tempfile.TemporaryDirectory(prefix="areal_like-", ignore_cleanup_errors=True) as scratch:
                return self._run(Path(scratch) / "folder")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, announcement: Path) -> int:
        num_failures, words = 0, self._words
        while True:
            first_step = self._step()
            code, cause = self._one(words, announcement)
            if code in FINAL or self._is_stopped:
                return code if code >= 0 else 128 - code
            if self._folder is None:
                return 1  # the command has printed why it could not begin
            step = self._step()
            num_failures = 1 if step > first_step else num_failures + 1
            if not self._can_resume():
                return 1
            if num_failures >= self._budget:
                times = "once" if num_failures == 1 else f"{num_failures} times in a row"
                print(
                    f"error: {self._folder.name} failed {times} without finishing a step; the last failure: {cause}. "
                    f"To continue the run: areal-like resume {self._folder.root}",
                    file=sys.stderr,
                )
                return 1
            record_restart(self._folder.root, cause, step)
            pause_s = min(MAX_PAUSE_S, 2.0**num_failures)
            print(f"{self._folder.name}: {cause}; resuming in {pause_s:.0f} s (--keep-alive)", file=sys.stderr)
            self._wait(pause_s)
            if self._is_stopped:
                return INTERRUPTED
            words = ["resume", str(self._folder.root), *(word for word in self._words if word == "--accept-loss")]

    def _one(self, words: Sequence[str], announcement: Path) -> tuple[int, str]:
        """Run one child to its end. Returns its return code, and why it ended."""
        child = self._child = self._spawn(words, announcement)
        # Reading large data sets comes before the first status.
        silent, last, has_written = 0, self._status_time(), False
        while True:
            try:
                code = child.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                pass
            self._look_for_folder(announcement)
            newest = self._status_time()
            has_written = has_written or (newest != last and newest is not None)
            is_silent = newest == last and has_written and not self._has_ended()
            silent, last = (silent + 1 if is_silent else 0), newest
            if silent >= SILENT_POLLS:
                child.kill()
                return child.wait(), f"the controller had written no status for {SILENT_POLLS * POLL_S:.0f} s"
        self._look_for_folder(announcement)
        return code, self._cause(code)

    def _look_for_folder(self, announcement: Path) -> None:
        if self._folder is None:
            with contextlib.suppress(FileNotFoundError):
                self._folder = RunFolder(Path(announcement.read_text()))

    def _cause(self, code: int) -> str:
        """`the controller was ended by signal SIGKILL`, or the reason that the run gives."""
        if code < 0:
            return f"the controller was ended by {describe_status(code)}"
        with contextlib.suppress(UserError):
            state = self._folder.read_state() if self._folder is not None else {}
            if reason := printable(" ".join(str(state.get("reason", "")).split())):
                return f"the run failed ({reason})"
        return f"the controller ended with {describe_status(code)}"

    def _can_resume(self) -> bool:
        assert self._folder is not None
        try:
            return is_resumable(self._folder.read_state())
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return False

    def _step(self) -> int:
        """Finished steps of the run; 0 before its folder is known. status.json may be older than metrics.jsonl."""
        if self._folder is None:
            return 0
        rows = (row for row in tail_rows(self._folder.metrics) if row.get("kind") == "step")
        found = [self._status().get("step"), *(row.get("step") for row in rows)]
        return max((step for step in found if isinstance(step, int)), default=0)

    def _status_time(self) -> object:
        return self._status().get("time_s")

    def _has_ended(self) -> bool:
        """Whether the run is over: then summary, audit and report are written, which take long for a long run."""
        return self._status().get("status") in ("finished", "stopped", "failed")

    def _status(self) -> dict[str, Any]:
        if self._folder is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._folder.status.read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def _wait(self, pause_s: float) -> None:
        while pause_s > 0 and not self._is_stopped:
            self._sleep(min(POLL_S, pause_s))
            pause_s -= POLL_S

    def _stop(self, number: int, _: object) -> None:
        """Pass a stop on. The terminal sends Ctrl-C to the child as well."""
        self._is_stopped = True
        if number != signal.SIGINT and self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)
