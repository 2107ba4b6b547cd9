"""`Run`: the public view of a run, in progress or ended, read from its folder.

Status and metrics are read in controller/runs/facts.py, samples in controller/runs/sample_rows.py; `stop` uses
controller/runs/stop.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import DeadlineExceeded, RunFailed
from controller.ledger.run_lock import lock_holder
from controller.python_api.controller_process import ControllerProcess
from controller.run_folder.locate import find_run
from controller.run_folder.owner_host import Kind, whereabouts
from controller.run_folder.run_folder import RunFolder
from controller.runs import stop as stop_command
from controller.runs.facts import TAIL_BYTES, read_facts, tail_rows
from controller.runs.sample_rows import Choice, Order, Sample, read_samples

POLL_S = 0.2
WHOLE_FILE = 1 << 62
MODEL_FILES = ("config.json", "adapter_config.json")
"""One of them is in the folder of a final model: the second if only its adapter was exported."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment."""

    state: Kind
    """running, finished, stopped, failed, crashed, or foreign (it belongs to another machine)."""
    message: str
    """One sentence: start time, or the reason of its end."""
    step: int | None
    """Steps done; None if not known yet."""
    num_steps: int | None
    accuracy: dict[int, float]
    """Accuracy on data.eval by version: greedy, or as in "Training from files" for a run from files."""
    waits: tuple[str, ...]
    """Current waits."""


class Run:
    """A run: its status, metrics and samples, also while it is in progress, and its model when it is finished.

    `train`, `resume`, `evaluate`, `sft`, `dpo` and `reward_model` return one; `Run("runs/first")` opens an existing
    run, by folder or name. Iterating yields the rows of its steps, from the first one until the run ends.

    Raises:
        UserError: there is no such run.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._folder = find_folder(run)
        self._process: ControllerProcess | None = None

    @classmethod
    def _started(cls, process: ControllerProcess) -> Run:
        run = cls.__new__(cls)
        run._folder, run._process = process.folder, process
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status.state})"

    @property
    def name(self) -> str:
        """The run's name."""
        return self._folder.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._folder.root

    @property
    def status(self) -> RunStatus:
        """Current status, as shown by `areal-like status`."""
        facts = read_facts(self._folder)
        waits = tuple(str(wait) for wait in facts.status.get("waits") or ())
        state, message = facts.where.kind, facts.where.words
        if self._process is not None and self._process.is_alive and state != "running":
            state, message = "running", "starting or ending"
        return RunStatus(state, message, facts.step, facts.num_steps, dict(facts.accuracy), waits)

    @property
    def output(self) -> str:
        """Output of the command so far; empty for a run that this object did not start."""
        return self._process.output if self._process is not None else ""

    @property
    def final_model(self) -> Path | None:
        """Folder of the final model in Hugging Face format, or of its adapter; None before the run is finished."""
        is_there = any((self._folder.final / name).is_file() for name in MODEL_FILES)
        return self._folder.final if is_there and self.status.state == "finished" else None

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        """Rows of metrics.jsonl so far, oldest first.

        Args:
            kind: `step` (one row per step), `eval` or another kind; empty for rows of all kinds.

        Returns:
            The rows, as in the file.

        Example:
            >>> [row["reward_mean"] for row in Run("quickstart").metrics()]
        """
        rows = tail_rows(self._folder.metrics, WHOLE_FILE)
        return [row for row in rows if not kind or row.get("kind") == kind]

    def samples(
        self,
        *,
        step: int | None = None,
        group: int | None = None,
        order: Order = "newest",
        limit: int | None = 20,
        grep: str = "",
    ) -> list[Sample]:
        """Finished samples with prompt, answer, reward and versions, as shown by `areal-like samples`.

        For an episode of several turns `trajectories` contains the sampled and the given text of each trajectory.

        Args:
            step: only samples that this step used.
            group: only samples of one prompt, by group number.
            order: `newest`, `worst`, `best`, or `given` (by group).
            limit: maximum number; None for all.
            grep: only samples with this text in prompt or answer, ignoring case.

        Returns:
            The samples, at most `limit`.

        Raises:
            UserError: there is no sample yet, or no such step or group.
        """
        return read_samples(self._folder, Choice(step=step, group=group, order=order, limit=limit, grep=grep)).samples

    def wait(self, timeout_s: float | None = None) -> Run:
        """Block until the run has ended. An interrupt (Ctrl-C) leaves the run in progress.

        Args:
            timeout_s: longest wait; None for no limit.

        Returns:
            This run.

        Raises:
            RunFailed: it failed or crashed; the text is the command line's.
            UserError: a user error that was detected during the run.
            DeadlineExceeded: it is still running after `timeout_s`.
        """
        due_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_ended(due_s):
            if due_s is not None and time.monotonic() >= due_s:
                assert timeout_s is not None
                raise DeadlineExceeded(f"the end of {self.name}", "its controller", timeout_s)
        self._check()
        return self

    def stop(self, *, now: bool = False, timeout_s: float = stop_command.DEFAULT_TIMEOUT_S) -> RunStatus:
        """Stop the run: it finishes the current step, saves and ends. Wait for it and return its status.

        Args:
            now: do not finish the step; `resume` continues from the last checkpoint.
            timeout_s: wait at most this long.

        Returns:
            Its status after the end.

        Raises:
            DeadlineExceeded: it is still running after `timeout_s`, and continues to shut down.
            UserError: the run belongs to another user.
        """
        self._wait_until_open()
        stop_command.stop(self._folder, now=now, timeout_s=timeout_s)
        if self._process is not None:
            self._process.wait(timeout_s)
        status = self.status
        if status.state == "running":
            raise DeadlineExceeded(f"the end of {self.name}", "its controller", timeout_s)
        return status

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each step when it is done. Raises like `wait` if the run fails."""
        last, num_bytes = 0, WHOLE_FILE
        while True:
            has_ended = self._has_ended_by_now()
            rows = self._steps_after(last, num_bytes)
            if (
                rows and rows[0]["step"] > last + 1 and num_bytes != WHOLE_FILE
            ):  # more than the tail since the last look
                rows = self._steps_after(last, WHOLE_FILE)
            for row in rows:
                if row["step"] > last:
                    last = row["step"]
                    yield row
            num_bytes = TAIL_BYTES
            if has_ended:
                break
            self._has_ended(time.monotonic() + POLL_S)
        self._check()

    def _steps_after(self, step: int, num_bytes: int) -> list[dict[str, Any]]:
        rows = tail_rows(self._folder.metrics, num_bytes)
        return [row for row in rows if row.get("kind") == "step" and row["step"] > step]

    def _has_ended(self, due_s: float | None) -> bool:
        """Return whether the run has ended, after a short wait, at most until `due_s`."""
        wait_s = POLL_S if due_s is None else max(0.0, min(POLL_S, due_s - time.monotonic()))
        if self._process is not None:
            return self._process.wait(wait_s)
        if self._has_ended_by_now():
            return True
        time.sleep(wait_s)
        return self._has_ended_by_now()

    def _has_ended_by_now(self) -> bool:
        if self._process is not None:
            return not self._process.is_alive
        return not whereabouts(self._folder).is_running

    def _check(self) -> None:
        if self._process is not None:
            where = whereabouts(self._folder)
            if where.kind not in ("finished", "stopped"):
                self._process.check()
        where = whereabouts(self._folder)
        if where.kind in ("failed", "crashed"):
            raise RunFailed(self.name, str(where.state.get("reason") or where.words))

    def _wait_until_open(self) -> None:
        """Wait until a controller that has just been started has the run's lock, so that it can be signalled."""
        while self._process is not None and self._process.is_alive and lock_holder(self.folder) is None:
            self._process.wait(POLL_S)


def find_folder(run: str | os.PathLike[str]) -> RunFolder:
    """The folder of a run, by path or name. Raises UserError."""
    return find_run(os.fspath(run))
