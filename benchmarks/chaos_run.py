"""A run under `areal-like train --keep-alive` whose processes are killed and suspended and whose disk is filled.

Each fault is followed by the time until the run works again: the process that was killed is replaced, and a step has
finished since. chaos.py decides which faults there are, and judges the result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.killed_run import KilledRun
from benchmarks.runs import environment

PROCESSES = ("controller", "rollout", "service", "trainer")
LOOK_S = 0.5
GIVE_UP_S = 900.0
"""Seconds after a fault without a finished step after which the run counts as lost."""
SUSPENDED_S = (3.0, 15.0)
"""Shortest and longest suspension."""
FULL_S = 20.0
"""Longest time with a full disk; it ends as soon as the run has failed of it."""
DISK_MB = 1024
PIECE_BYTES = 1 << 20
RESUMING = "(--keep-alive)"
"""In the line that `--keep-alive` prints before it resumes a run."""


class FaultKind(NamedTuple):
    """A fault: `kill` (SIGKILL) or `suspend` (SIGSTOP, later SIGCONT) a process, or `fill` the disk."""

    act: str
    target: str

    @property
    def words(self) -> str:
        """As in the table."""
        return {"kill": "kill -9", "suspend": "SIGSTOP", "fill": "full"}[self.act] + f" {self.target}"


def fault_kinds(*, has_small_disk: bool) -> list[FaultKind]:
    """All kinds of faults."""
    kinds = [FaultKind(act, target) for act in ("kill", "suspend") for target in PROCESSES]
    return [*kinds, *([FaultKind("fill", "disk")] if has_small_disk else [])]


def drawn_faults(kinds: Sequence[FaultKind], dice: random.Random) -> Iterator[FaultKind]:
    """Every kind once in random order, again and again."""
    while True:
        yield from dice.sample(kinds, len(kinds))


class ChaosRun(KilledRun):
    """One run; `--keep-alive` resumes it."""

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        return super()._start(*words, "--keep-alive", "--max-failures=1000")

    # ------------------------------------------------------------ faults

    def strike(self, fault: FaultKind) -> dict[str, Any] | None:
        """Cause a fault, end it, and wait until the run works again. None: there was no such process.

        Returns seconds for which the fault lasted (`held_s`) and from its end until recovery (`recovery_s`), and the
        number of resumed controllers meanwhile. Raises SystemExit if the run does not recover.
        """
        num_restarts = self.num_restarts()
        if fault.act == "fill":
            held_s = self._fill(num_restarts)
            is_back: Callable[[], bool] = lambda: True  # noqa: E731
        else:
            before = self._processes(fault.target)
            if not before:
                return None
            chosen = self._dice.choice(before)
            held_s = self._signal(chosen, fault.act)
            known = {process.pid for process in before}
            is_back = (
                (lambda: any(process.pid not in known for process in self._processes(fault.target)))
                if fault.act == "kill"
                else lambda: True
            )
        ended_s, ended_at_s = time.monotonic(), time.time()
        self._until(is_back, fault)
        back_at_s = max(time.time(), ended_at_s)
        self._until(lambda: self.last_step_s() > back_at_s, fault)
        self.kills[fault.words] += 1
        return {
            "fault": fault.words, "held_s": round(held_s, 2), "recovery_s": round(time.monotonic() - ended_s, 2),
            "resumes": self.num_restarts() - num_restarts,
        }  # fmt: skip

    def _until(self, is_reached: Callable[[], bool], fault: FaultKind) -> None:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not is_reached():
            if time.monotonic() > give_up_s:
                raise self._failure(f"no recovery from {fault.words} in {GIVE_UP_S:.0f} s")
            self.watch(LOOK_S)

    def _processes(self, kind: str) -> list[psutil.Process]:
        if kind != "controller":
            return list(self._of_kind(kind))
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
            pid = int(json.loads((self.folder / "state.json").read_text())["controller_pid"])
            return [process for process in self._family() if process.pid == pid != self._process.pid]
        return []

    def _signal(self, process: psutil.Process, act: str) -> float:
        """Kill or suspend a process; returns how long it was suspended, in seconds."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if act == "kill":
                process.kill()
                return 0.0
            began_s = time.monotonic()
            process.suspend()
            try:
                self.watch(self._dice.uniform(*SUSPENDED_S))
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor may have killed it
                    process.resume()
            return time.monotonic() - began_s
        return 0.0

    def _fill(self, num_restarts: int) -> float:
        """Fill the disk until the run has failed of it, at most FULL_S; returns for how long, in seconds."""
        ballast, began_s = self.folder.parent / "ballast", time.monotonic()
        try:
            with ballast.open("wb", buffering=0) as file:
                while time.monotonic() < began_s + FULL_S and self.num_restarts() == num_restarts:
                    fill_up(file)
                    self.watch(LOOK_S)
        finally:
            ballast.unlink()
        return time.monotonic() - began_s

    def num_restarts(self) -> int:
        """How often it was resumed, by its output: on a full disk restarts.jsonl is not written."""
        return self._log.read_text(errors="replace").count(RESUMING)

    def last_step_s(self) -> float:
        """When the newest step was recorded, as Unix time; 0 if there is none."""
        return float(self._last_step().get("time_s", 0.0))

    def end(self) -> None:
        """Stop the run after its running step, and wait for its end."""
        self._controller_command("stop", str(self.folder))
        self.wait_for_end()

    def _controller_command(self, *words: str) -> None:
        done = command(*words)
        if done.returncode != 0:
            raise self._failure(f"areal-like {' '.join(words)}: {done.stdout}{done.stderr}")


def fill_up(file: Any) -> None:
    """Write to a file until the disk has no room, to the last byte."""
    size = PIECE_BYTES
    while size:
        try:
            file.write(bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size //= 2


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `areal-like WORDS`."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "controller", *words],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = DISK_MB) -> Iterator[str]:
    """Mount a small file system at `folder`. Yields why it could not be mounted; empty if it was."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        why = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        why = str(error)
    try:
        yield why
    finally:
        if not why:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
