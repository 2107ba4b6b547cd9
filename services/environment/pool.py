"""The environment processes: a fixed number that run episodes and are replaced when one is lost.

The pool starts processes, decides which must be killed (overdue, stuck, too much memory, enough episodes), and which
episode is at fault for an exit. Episodes are in episode_scheduler.py, which is notified of an exit by `on_lost`.

Loops.  `_refill`  waits for missing processes, woken by every loss; starts new ones.
        `_watch`   sleeps WATCH_S; kills processes that are overdue, stuck or use too much memory.
        `_serve`   one per process: passes its replies on until it exits.
They stop when cancelled by the server, which then calls `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable

from areal_like.descendants import children_of
from areal_like.errors import OperationError, UserError
from areal_like.slow import print_slow
from services.environment.config import EnvironmentSettings
from services.environment.host_process import HostProcess
from services.environment.job import Answered, Failed, HostSetup
from services.environment.marker import NOBODY
from services.processes import process_tree
from services.processes.child_process import Died, OutputLog, start_first

log = logging.getLogger(__name__)

WATCH_S = 0.1
MEMORY_EVERY = 3
"""Memory is checked every this many rounds of the watch."""
LOOK_AGAIN_S = 5.0
START_TIMEOUT_S = 120.0
SLOW_START_S = 5.0
MAX_FAILED_STARTS = 8
"""Number of consecutive failed starts that end the service."""
SILENT_S = 5.0
"""A process with replies due, in which no call begins or ends for this long after `step_timeout_s`, is stuck outside of
episodes."""
STARVED_TIMES = 10
"""A call that only waits for the processor may take this many times `step_timeout_s`."""
RETIRE_SHARE = 0.5
"""Share of `max_memory_mb` above which a process accepts no further episodes."""

LIVING_TIMES = 2
"""Largest number of processes relative to `num_processes`, including those that are retired, starting or being killed.
"""

Lost = Callable[[HostProcess, str], None]
"""Called with a process that has exited, and the reason."""


class HostPool:
    """Call `start`, then `run` as a task; `place` chooses a process for an episode."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        on_message: Callable[[HostProcess, Answered | Failed], None],
        on_lost: Lost,
        on_ready: Callable[[], None],
        neighbours: Callable[[], frozenset[int]],
    ) -> None:
        """`neighbours`: other processes of the service, which are not orphans."""
        self._settings, self._on_message, self._on_lost, self._on_ready = settings, on_message, on_lost, on_ready
        self._neighbours, self._others = neighbours, frozenset(children_of(os.getpid()))
        self._setup = HostSetup(settings=settings.model_dump(mode="json"), service_pid=os.getpid())
        self._hosts: dict[int, HostProcess] = {}
        """All processes that were started and not yet reaped, by process id."""
        self._ready: set[HostProcess] = set()
        self._unserved: list[HostProcess] = []
        self._num_dying = 0
        """Processes that are no longer ready, and not yet reaped."""
        self._lost = asyncio.Event()
        self._num_failed_starts = 0
        self._output_log = OutputLog("environments")
        self.counters: Counter[str] = Counter()

    @property
    def num_ready(self) -> int:
        """Number of processes that accept episodes."""
        return sum(not host.is_retired for host in self._ready)

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of all its processes."""
        return frozenset(self._hosts)

    async def start(self) -> None:
        """Load the environment in one process first, which detects the user's mistakes. Raises UserError."""
        kind = self._settings.kind
        notice = asyncio.get_running_loop().call_later(
            SLOW_START_S, print_slow, f"loading environment {kind}", SLOW_START_S, START_TIMEOUT_S
        )
        try:
            self._unserved.append(await start_first(self._start_one))
        except Died as error:
            where = "reward.environment.kind"
            raise UserError(f"{kind} cannot be loaded: {error.reason}", where=where) from error
        finally:
            notice.cancel()

    async def run(self) -> None:
        """Keep the processes running until cancelled. Raises OperationError if they do not start."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refill(tasks), name="environment refill")
            tasks.create_task(self._watch(), name="environment watch")

    def place(self) -> HostProcess | None:
        """The process with the fewest episodes; None while there is none."""
        takers = [host for host in self._ready if not host.is_retired]
        return min(takers, key=lambda host: len(host.episodes), default=None)

    def look_after(self, host: HostProcess) -> None:
        """Retire the process if it has served enough, after an episode began or ended there."""
        if host.num_begun >= self._settings.recycle_after:
            host.is_retired = True
        if host.is_retired:
            self._lost.set()

    def blame(self, host: HostProcess, episode: int, kind: str, reason: str) -> None:
        """Kill a process because of an episode in it; `_serve` detects its exit."""
        if host.killed_because or host not in self._ready:
            return
        host.culprit, host.culprit_kind, host.killed_because = episode, kind, reason
        log.warning("killing environment process %d: %s", host.pid, reason)
        process_tree.kill_tree_now(host.pid)

    async def close(self) -> None:
        """End every process and everything below them."""
        for host in list(self._hosts.values()):
            host.kill_now()
            host.close_marker()
        self._hosts.clear()
        self._ready.clear()

    # ------------------------------------------------------------ loops

    async def _refill(self, tasks: asyncio.TaskGroup) -> None:
        starting: set[asyncio.Task[None]] = set()
        while True:
            while self._unserved:
                tasks.create_task(self._serve(self._unserved.pop()))
            for host in [host for host in self._ready if host.is_retired and not host.episodes]:
                self.counters["recycled"] += 1
                self.blame(host, NOBODY, "crashed", "the process has run the maximum number of episodes")
            for _ in range(self._num_to_start(len(starting))):
                task = tasks.create_task(self._start_again(), name="environment process start")
                starting.add(task)
                task.add_done_callback(starting.discard)
                task.add_done_callback(lambda _: self._lost.set())
            self._lost.clear()
            with contextlib.suppress(TimeoutError):  # nothing is due while all run; check again anyway
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._lost.wait()

    def _num_to_start(self, num_starting: int) -> int:
        """Number of processes that may start now. If retired processes take the room, those with the fewest episodes
        are killed."""
        most = LIVING_TIMES * self._settings.num_processes
        wanted = self._settings.num_processes - self.num_ready - num_starting
        room = most - len(self._ready) - self._num_dying - num_starting
        retired = [host for host in self._ready if host.is_retired]
        staying = sorted((host for host in retired if not host.killed_because), key=lambda host: len(host.episodes))
        num_going = self._num_dying + len(retired) - len(staying)
        for host in staying[: max(wanted - max(room, 0) - num_going, 0)]:
            self.counters["killed_retired"] += 1
            host.makes_room = True
            self.blame(host, NOBODY, "crashed", f"more than {most} environment processes would be running")
        return max(min(wanted, room), 0)

    async def _start_one(self) -> HostProcess:
        host = HostProcess.start(self._output_log)
        self._hosts[host.pid] = host
        try:
            await host.prepare(self._setup, START_TIMEOUT_S)
        except BaseException:
            host.kill_now()
            host.close_marker()
            self._hosts.pop(host.pid, None)
            raise
        self.counters["started"] += 1
        self._num_failed_starts = 0
        self._ready.add(host)
        self._on_ready()
        return host

    async def _start_again(self) -> None:
        if self._num_failed_starts:
            await asyncio.sleep(min(5.0, 0.1 * 2**self._num_failed_starts))
        try:
            self._unserved.append(await self._start_one())
        except (Died, UserError) as error:
            self.counters["failed_starts"] += 1
            self._num_failed_starts += 1
            log.error(
                "an environment process did not start (consecutive failures: %d): %s", self._num_failed_starts, error
            )
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                raise OperationError(f"environment processes can no longer be started: {error}") from error

    async def _serve(self, host: HostProcess) -> None:
        reason = await host.run(lambda message: self._on_message(host, message))
        self._ready.discard(host)
        self._num_dying += 1
        if not host.culprit and not host.killed_because:  # it exited by itself: find the episode at fault
            host.culprit = host.look().episode
            self.counters["died"] += 1
        if host.episodes or not host.killed_because:
            log.warning(
                "environment process %d ended (%s) while running %d episodes", host.pid, reason, len(host.episodes)
            )
        self._on_lost(host, reason)
        self._lost.set()  # a new process starts while this one's tree is being killed
        await host.kill()
        host.close_marker()
        self._hosts.pop(host.pid, None)
        self._num_dying -= 1
        self._lost.set()  # there may be room for a new process only now
        await process_tree.kill_orphans(self._others | self.pids | self._neighbours())

    async def _watch(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(WATCH_S)
            turn += 1
            for host in list(self._ready):
                if not host.check() or host.killed_because:
                    continue
                self._check_time(host)
                if turn % MEMORY_EVERY == 0:
                    self._check_memory(host)

    def _check_time(self, host: HostProcess) -> None:
        mark, limit_s, now_s = host.look(), self._settings.step_timeout_s, time.monotonic()
        ran_s = now_s - mark.since_s if mark.episode != NOBODY else 0.0
        is_starved = ran_s > WATCH_S and host.is_starved(mark, limit_s)
        if ran_s > limit_s * (STARVED_TIMES if is_starved else 1):
            self.counters["killed_overdue"] += 1
            self.blame(host, mark.episode, "timed_out", f"the environment took longer than {limit_s:g} s")
        elif host.waiting and mark.episode == NOBODY and now_s - host.moved_s > limit_s + SILENT_S:
            self.counters["killed_silent"] += 1
            self.blame(host, NOBODY, "crashed", "the environment process does not respond")

    def _check_memory(self, host: HostProcess) -> None:
        limit_bytes = self._settings.max_memory_mb << 20
        used_bytes = process_tree.tree_holds_more_than(host.pid, int(limit_bytes * RETIRE_SHARE))
        if used_bytes <= limit_bytes:
            if used_bytes and not host.is_retired:
                self.counters["retired_memory"] += 1
                host.is_retired = True
                self._lost.set()
            return
        self.counters["killed_memory"] += 1
        mark, half = host.look(), limit_bytes // 4
        grown_bytes = used_bytes - mark.used_bytes if mark.episode != NOBODY else 0
        culprit = mark.episode if grown_bytes > max(mark.heaviest_bytes, half) else NOBODY
        if culprit == NOBODY and mark.heaviest_bytes > half:
            culprit = mark.heaviest
        reason = f"the environment process used {used_bytes >> 20} MB, which is more than max_memory_mb"
        self.blame(host, culprit, "crashed", f"{reason} {self._settings.max_memory_mb}")
