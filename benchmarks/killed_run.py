"""One run whose processes are killed from outside: starts it, finds and kills processes, and recounts its ledger.

Processes are found by their command lines among the controller's descendants. killed_runs.py decides what is killed
when, and judges the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from areal_like.descendants import children_of, descendants_of
from areal_like.guard import SHM
from areal_like.process import command_words, is_alive
from benchmarks.runs import environment
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE
from controller.ledger.schema import read_batches

TORCH_CACHE = "torchinductor_"
"""A folder that torch makes once for all processes of a user."""

HARD = ("service", "rollout", "trainer", "controller")
"""Processes that every run has; the others are `environment` and `program`."""
MODULES = {
    "service": "services.reward", "rollout": "rollout", "trainer": "trainer",
    "environment": "services.environment.host",
}  # fmt: skip
PROGRAM = "preload.py"
"""Part of the command line of a forked program, of its guard, and of the process they were forked from."""
LOOK_S = 1.0
HANG_S = 3600.0
"""A run without a step for this long counts as hanging."""
END_S = 30.0
"""Seconds after the run's end within which its processes must end."""


class KilledRun:
    """A run; it is resumed after its controller is killed."""

    def __init__(self, config: str, overrides: Sequence[str], name: str, runs_dir: Path, scratch: Path) -> None:
        """`scratch`: a folder for the temporary files of this run."""
        self.folder = runs_dir / name
        self._scratch, self._dice = scratch, random.Random(1)
        self._shared_before = set(os.listdir(SHM))
        self._seen: dict[int, psutil.Process] = {}
        """Its current and former processes by id."""
        self.kills: Counter[str] = Counter()
        self.num_resumes = 0
        self.most_at_once = 0
        """Largest number of concurrent environments or programs."""
        self._process = self._start("train", config, *overrides, f"name={name}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "controller", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**environment(), "TMPDIR": str(self._scratch / "tmp")}, start_new_session=True,
            )  # fmt: skip

    @property
    def _log(self) -> Path:
        (self._scratch / "tmp").mkdir(exist_ok=True)
        return self._scratch / "log"

    # ------------------------------------------------------------ watching

    def watch(self, seconds: float) -> None:
        """Let it run for this time. Raises SystemExit if it ends with an error."""
        until_s = time.monotonic() + seconds
        while True:
            self._look()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(LOOK_S, left_s))

    def wait_for_step(self, step: int) -> None:
        """Wait until it has completed this step. Raises SystemExit if it ends or hangs before."""
        self._wait(lambda: self.num_steps() >= step, f"step {step}")

    def wait_for_end(self) -> None:
        """Wait until it has ended successfully. Raises SystemExit if it does not."""
        self._wait(lambda: self._process.poll() == 0, "the end")

    def _wait(self, is_reached: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + HANG_S
        while not is_reached():
            if time.monotonic() > give_up_s:
                raise self._failure(f"no {what} in {HANG_S:.0f} s")
            self.watch(LOOK_S)

    def _look(self) -> None:
        family = self._family()
        self.most_at_once = max(self.most_at_once, self._num_held(), sum(1 for _ in _programs(family)))
        if self._process.poll() not in (None, 0):
            raise self._failure(f"the run ended with status {self._process.returncode}")

    def _failure(self, what: str) -> SystemExit:
        return SystemExit(f"{what}:\n{self._log.read_text(errors='replace')[-6000:]}")

    def num_steps(self) -> int:
        """The newest finished step."""
        return int(self._last_step().get("step", 0))

    def _last_step(self) -> dict[str, Any]:
        """The newest row of a step; empty if there is none."""
        with contextlib.suppress(OSError):
            for line in reversed((self.folder / "metrics.jsonl").read_text(errors="replace").splitlines()):
                with contextlib.suppress(ValueError):
                    if (row := json.loads(line)).get("kind") == "step":
                        return dict(row)
        return {}

    def _num_held(self) -> int:
        """Episodes that the reward service holds, by its last report."""
        with contextlib.suppress(OSError, ValueError):
            processes = json.loads((self.folder / "status.json").read_text())["processes"]
            return int(processes.get("reward", {}).get("counters", {}).get("environment.episodes", 0))
        return 0

    # ------------------------------------------------------------ killing

    def kill(self, kind: str) -> None:
        """Send SIGKILL to a random process of this kind, if there is one."""
        if kind == "controller":
            self._kill_controller()
        elif found := list(self._of_kind(kind)):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._dice.choice(found).kill()
                self.kills[kind] += 1

    def _kill_controller(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            self.kills["controller"] += 1
            self.num_resumes += 1
            self._process = self._start("resume", str(self.folder))

    def _of_kind(self, kind: str) -> Iterator[psutil.Process]:
        family = self._family()
        if kind == "program":
            yield from _programs(family)
            return
        for process in family:
            words = _words_of(process)
            if "-m" in words and words[words.index("-m") + 1] == MODULES[kind]:
                yield process

    def _family(self) -> list[psutil.Process]:
        """The controller and its current descendants; all are recorded in `_seen`."""
        for pid in (self._process.pid, *descendants_of(self._process.pid)):
            known = self._seen.get(pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                if known is None or not known.is_running():
                    self._seen[pid] = psutil.Process(pid)
        return [process for process in self._seen.values() if process.is_running()]

    def destroy(self) -> None:
        """End its remaining processes, by one interrupt and then by force. Does nothing if it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.kill()
            self._process.wait()

    # ------------------------------------------------------------ after its end

    def left(self) -> dict[str, list[str]]:
        """Remains of the run by kind: processes, its files in shared memory, temporary files."""
        _, alive = psutil.wait_procs(self._seen.values(), timeout=END_S)
        shared = set(os.listdir(SHM)) - self._shared_before
        run_id = json.loads((self.folder / "state.json").read_text())["run_id"]
        return {
            "processes": [" ".join(_words_of(process))[:200] for process in alive if is_alive(process)],
            "shared_memory": sorted(name for name in shared if run_id in name),
            "temporary_files": sorted(
                path.name for path in (self._scratch / "tmp").iterdir() if not path.name.startswith(TORCH_CACHE)
            ),
        }

    def recount(self) -> dict[str, Any]:
        """Counts from its ledger: see killed_runs.py."""
        found = audit(self.folder)
        db = sqlite3.connect(f"{(self.folder / LEDGER_FILE).as_uri()}?mode=ro", uri=True)
        with contextlib.closing(db):
            return {**recount(db), "findings": [*found.findings, *repeats(db)], "recounted": found.num_payloads}


def recount(db: sqlite3.Connection) -> dict[str, int]:
    """Numbers of groups and samples by fate."""
    fates = dict(db.execute("SELECT fate, COUNT(*) FROM groups GROUP BY fate"))
    (num_failed,) = db.execute("SELECT COUNT(*) FROM samples WHERE verdict_kind != 'scored'").fetchone()
    trained = [len(group.sample_indices) for batch in read_batches(db) for group in batch.groups]
    return {
        "drawn": sum(fates.values()), "consumed": fates.get("consumed", 0), "filtered": fates.get("filtered", 0),
        "dropped": fates.get("dropped", 0), "in_flight": fates.get("live", 0), "trained": sum(trained),
        "failed": num_failed,
    }  # fmt: skip


def repeats(db: sqlite3.Connection) -> list[str]:
    """One sentence for each sample that is in two steps, or in one step without having ended."""
    ended = set(db.execute("SELECT group_id, sample_index FROM samples WHERE is_kept"))
    used = Counter(
        (group.group_id, index)
        for batch in read_batches(db)
        for group in batch.groups
        for index in group.sample_indices
    )
    twice = [f"sample {sample} is in {count} steps" for sample, count in used.items() if count > 1]
    return [*twice, *(f"sample {sample} is trained on and has not ended" for sample in used.keys() - ended)]


def _programs(family: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    """The agent programs of a family: each has its own guard as parent and no children."""
    forked = {process.pid for process in family if any(word.endswith(PROGRAM) for word in _words_of(process))}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid in forked and process.ppid() in forked and not children_of(process.pid):
                yield process


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return command_words(process)
    except psutil.Error:
        return []
