"""One run of a program in a cell: waits for it within its limits.

It measures own time, and checks memory and tasks while waiting. The time of several runs together is in deadline.py.

Own time of a program: the processor seconds of its tree, and the seconds in which all of it did nothing but wait, for a
timer or for input that never comes. Time in which a task waited for a processor is not own time, nor is time in which
the judge, which measures, had no processor. So a busy machine does not fail a correct program, and a sleeping program
gains no time. Time waiting for a disk counts only against a much larger bound, because a program can simulate it
(vfork).
"""

from __future__ import annotations

import os
import select
import signal
import time

from services.reward.sandbox.cell import Cell, SandboxFailed
from services.reward.sandbox.deadline import Deadline
from services.reward.sandbox.limits import Limits
from services.reward.sandbox.usage import Usage, queued_here_s

LOOK_EVERY_S = 0.05
MAX_WAIT_S = 2 * LOOK_EVERY_S
"""A longer interval means that the judge itself, or its machine, was stopped."""
BLOCKED_FACTOR, BLOCKED_ROOM_S = 3.0, 2.0


class Stopped(Exception):
    """The run was stopped before it gave the expected result. `why` is a message."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class Run:
    """Call `wait` as often as needed; time counts in `wait` only."""

    def __init__(self, cell: Cell, limits: Limits, deadline: Deadline, room_s: float = 0.0) -> None:
        """`deadline` is charged with this run's own time, which may exceed it by `room_s`."""
        self._cell, self.limits, self._deadline, self.room_s = cell, limits, deadline, room_s
        before = cell.usage()
        self._cpu_before_s, self._active_s = before.cpu_s, before.active_s
        self._cpu_s = self._idle_s = self._blocked_s = 0.0
        self._waited_s, self._queued_here_s, self._looked_s = 0.0, queued_here_s(), time.monotonic()
        """`_waited_s`: seconds of waiting since the last measurement."""
        self.status: int | None = None
        """Wait status, once the run has ended by itself."""

    def wait(self, fds: dict[int, int]) -> dict[int, int]:
        """Wait for any of these (descriptor: poll events); returns the events, empty if the run ended first.

        Raises Stopped, and SandboxFailed, also if the wall-clock bound is reached.
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
            self._waited_s += min(now_s - began_s, MAX_WAIT_S)
            has_ended = happened.pop(self._cell.control_fd, None) is not None
            if has_ended and not happened:
                self._end()
                return {}
            if now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = now_s
                self._look()
            if happened:
                return happened
            if now_s > self._deadline.until_s:
                raise SandboxFailed(f"no verdict within {self._deadline.wall_s:g} s: the machine is too busy")

    def settle(self) -> None:
        """Charge the time used since the last measurement, at the end of waiting for this run."""
        usage = self._cell.usage()
        self._charge(usage, is_waiting=not usage.is_ready)

    @property
    def own_s(self) -> float:
        """Own time of the program up to the last measurement."""
        return self._cpu_s + self._idle_s

    def _end(self) -> None:
        self.status = self._cell.ended()
        if self.status is None:
            raise Stopped("its sandbox was ended")
        self._charge(
            self._cell.usage(), is_waiting=False
        )  # the time in which its tasks waited for a processor is no longer known
        self._check_time()

    def _look(self) -> None:
        usage = self._cell.usage()
        self._charge(usage, is_waiting=not usage.is_ready)
        self._check_time()
        if why := _excess(usage, self.limits):
            raise Stopped(why)

    def _charge(self, usage: Usage, *, is_waiting: bool) -> None:
        before_s, queued_here = self.own_s, queued_here_s()
        self._cpu_s = max(self._cpu_s, usage.cpu_s - self._cpu_before_s)
        if is_waiting:
            was_active_s = max(usage.active_s - self._active_s, 0.0) + queued_here - self._queued_here_s
            waited_s = max(self._waited_s - was_active_s, 0.0)
            if usage.is_blocked:
                self._blocked_s += waited_s
            else:
                self._idle_s += waited_s
        self._waited_s, self._active_s, self._queued_here_s = 0.0, usage.active_s, queued_here
        self._deadline.spent_s += self.own_s - before_s

    def _check_time(self) -> None:
        time_s = self.limits.time_s
        if self.own_s > time_s or self.own_s + self._blocked_s > BLOCKED_FACTOR * time_s + BLOCKED_ROOM_S:
            raise Stopped(f"time limit of {time_s:g} s")
        if self._deadline.left_s(self.room_s) < 0:
            raise Stopped("time limit of all its tests together")


def _excess(usage: Usage, limits: Limits) -> str:
    if usage.memory_bytes > limits.memory_bytes:
        return f"memory limit of {limits.memory_bytes >> 20} MB"
    if usage.num_tasks > limits.max_tasks:
        return f"limit of {limits.max_tasks} processes and threads"
    return ""


def words_for(status: int, limits: Limits) -> str:
    """Describe how a process ended, from its wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    if -code == signal.SIGXCPU or (-code == signal.SIGKILL):
        return f"killed (time limit of {limits.time_s:g} s, or memory)"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    return f"killed by signal {name}"
