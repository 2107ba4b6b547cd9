"""One run of a program in a cell: waiting for it within its limits.

Owns: looking at time, memory and tasks while waiting, the words for why a run was stopped. Refuses: what is waited for
(judging), ending it (cell).

Time is the program's own: processor seconds of its tree, or seconds on the wall less those that it stood in the queue
for a processor. So a busy machine costs no honest program its verdict, and a sleeping one gains nothing. The wall has a
bound of its own far beyond.
"""

from __future__ import annotations

import os
import select
import signal
import time

from services.reward.sandbox.cell import Cell
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.usage import Usage

LOOK_EVERY_S = 0.05
WALL_FACTOR, WALL_ROOM_S = 3.0, 2.0


class Stopped(Exception):
    """The run is over before it gave what was waited for. `why` in plain words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Run:
    """`wait` as often as needed; the clock runs in `wait` only."""

    def __init__(self, cell: Cell, limits: Limits, until_s: float) -> None:
        """`until_s`: no wait goes beyond this moment (of time.monotonic)."""
        self._cell, self.limits, self.until_s = cell, limits, until_s
        self._waited_s, self._looked_s, self._queued_s = 0.0, time.monotonic(), 0.0
        self._cpu_before_s = cell.usage().cpu_s
        self.status: int | None = None
        """Wait status, once the run has ended by itself."""

    def wait(self, fds: dict[int, int]) -> dict[int, int]:
        """Wait for any of these (descriptor: poll events); what happened, empty when the run ended first.

        Raises Stopped, SandboxFailed.
        """
        poll = select.poll()
        for fd, events in fds.items():
            poll.register(fd, events)
        if self.status is None:
            poll.register(self._cell.control_fd, select.POLLIN)
        while True:
            began_s = time.monotonic()
            happened = dict(poll.poll(LOOK_EVERY_S * 1000))
            now_s = time.monotonic()
            self._waited_s += now_s - began_s
            if now_s - self._looked_s >= LOOK_EVERY_S:
                self._look(now_s)
            has_ended = happened.pop(self._cell.control_fd, None) is not None
            if happened:
                return happened
            if has_ended:
                self._end()
                return {}

    def _end(self) -> None:
        self.status = self._cell.ended()
        if self.status is None:
            raise Stopped("its sandbox was ended")

    def _look(self, now_s: float) -> None:
        self._looked_s = now_s
        usage, limits = self._cell.usage(), self.limits
        cpu_s = usage.cpu_s - self._cpu_before_s
        self._queued_s = max(self._queued_s, usage.queued_s)
        own_s = max(cpu_s, self._waited_s - self._queued_s)
        if own_s > limits.time_s or self._waited_s > WALL_FACTOR * limits.time_s + WALL_ROOM_S:
            raise Stopped(f"time limit of {limits.time_s:g} s")
        if now_s > self.until_s:
            raise Stopped("time limit of all its tests together")
        if why := _excess(usage, limits):
            raise Stopped(why)


def _excess(usage: Usage, limits: Limits) -> str:
    if usage.memory_bytes > limits.memory_bytes:
        return f"memory limit of {limits.memory_bytes >> 20} MB"
    if usage.num_tasks > limits.max_tasks:
        return f"limit of {limits.max_tasks} processes and threads"
    return ""


def words_for(status: int, limits: Limits) -> str:
    """How a process ended, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    if -code == signal.SIGXCPU or (-code == signal.SIGKILL):
        return f"killed (time limit of {limits.time_s:g} s, or memory)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"killed by signal {name}"
