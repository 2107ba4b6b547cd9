"""The pool: a fixed number of loaded scoring processes, each used for one answer at a time and replaced when it is
lost.

The pool starts processes, tracks which are idle, and decides which must be killed (overdue, dead, too much memory,
children left behind, enough served). Queues, retries and verdicts are in request_scheduler.py; outcomes of scorers are
passed on unchanged.

Loops.  `_refill` waits for missing processes, woken by every loss; starts new ones, one task each.
        `_watch` sleeps WATCH_S; it detects idle processes that died, wakes the exchange of a busy one that died, and
        kills processes that use too much memory.
        `attempt` waits for an idle process (woken by `_refill` or by the end of another attempt), then for its answer
        for at most `limit_s`.
They stop when cancelled by the server, which then calls `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable

from areal_like.descendants import children_of
from areal_like.errors import DeadlineExceeded, OperationError, UserError
from areal_like.slow import print_slow
from services.processes import process_tree
from services.processes.child_process import Died, OutputLog, start_first
from services.reward.config import RewardSettings
from services.reward.job import Outcome, Ready, make_setup
from services.reward.model_hosts import ModelHosts
from services.reward.process_handle import Overdue, ScoringProcess

log = logging.getLogger(__name__)

WATCH_S = 0.1
LOOK_AGAIN_S = 5.0
MEMORY_EVERY = 3
"""Memory is checked every this many rounds of the watch."""
START_TIMEOUT_S = 300.0
SLOW_START_S = 5.0
"""A longer wait at the start is explained to the user."""
MAX_FAILED_STARTS = 8
"""Number of consecutive failed starts that end the service."""
IDLE_WAIT_S = START_TIMEOUT_S * 2


class Pool:
    """Call `start`, then `run` as a task, then `attempt` from at most `num_workers` tasks at once, then `close`."""

    def __init__(
        self,
        settings: RewardSettings,
        neighbours: Callable[[], frozenset[int]] = lambda: frozenset(),
        *,
        is_shared: bool = False,
    ) -> None:
        """`neighbours`: other processes of the service, which are not orphans. is_shared: by several runs, so that no
        answer may end the service."""
        self._settings, self._neighbours = settings, neighbours
        self._hosts = ModelHosts(settings)
        self._setup = make_setup(self._hosts.settings, os.getpid(), is_shared=is_shared)
        self._target = settings.num_workers + settings.num_spares
        self._max_bytes = settings.max_memory_mb << 20
        self._processes: dict[int, ScoringProcess] = {}
        """All processes that were started and not yet reaped, by process id."""
        self._idle: deque[ScoringProcess] = deque()
        self._busy: set[ScoringProcess] = set()
        self._idle_came = asyncio.Condition()
        self._lost = asyncio.Event()
        self._num_failed_starts = 0
        self._output_log = OutputLog()
        self._others = frozenset(children_of(os.getpid()))
        """Child processes that do not belong to the pool."""
        self.counters: Counter[str] = Counter()
        self.names: list[str] = []
        self.label = ""
        self.volatile: list[str] = []
        """Names of scorers that are not deterministic."""

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of all its processes."""
        return frozenset(self._processes.keys() | self._hosts.pids)

    @property
    def num_ready(self) -> int:
        """Number of loaded processes, idle or busy."""
        return len(self._idle) + len(self._busy)

    @property
    def num_busy(self) -> int:
        """Number of processes that score now."""
        return len(self._busy)

    async def start(self) -> None:
        """Load the scorers in one child first, which detects the user's mistakes, then fill the pool.

        Raises UserError if a scorer refuses, or if loading it crashes or takes too long.
        """
        await self._hosts.start()
        kinds = ", ".join(scorer.kind for scorer in self._settings.scorers)
        notice = asyncio.get_running_loop().call_later(
            SLOW_START_S, print_slow, f"loading reward scorer {kinds}", SLOW_START_S, START_TIMEOUT_S
        )
        try:
            ready = await start_first(self._start_one)
        except Died as error:
            raise UserError(
                f"the scorer cannot be loaded: {error.reason}",
                where=f"reward scorer {kinds}",
                remedy="check the code that runs when the module of the scorer is imported" if ":" in kinds else "",
            ) from error
        finally:
            notice.cancel()
        self.names, self.label, self.volatile = ready.names, ready.label, ready.volatile
        self._lost.set()

    async def run(self) -> None:
        """Keep the pool full and watched until cancelled. Raises OperationError if it cannot be filled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refill(), name="pool refill")
            tasks.create_task(self._watch(), name="pool watch")
            tasks.create_task(self._hosts.run(), name="reward models")

    async def attempt(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        """Score one framed job. `timed_out` and `crashed` are returned after the whole process tree was killed. Raises
        UserError if nothing can be scored before the user changes something (areal_like/external/errors.py); never if
        the service is shared."""
        process = await self._take_idle()
        started_s = time.monotonic()
        try:
            outcome = await process.score(job, job_id, limit_s)
        except Overdue as overdue:
            self.counters["killed_overdue"] += 1
            reason = f"{overdue.scorer or 'the scoring process'} took longer than {limit_s:g} s"
            outcome = self._failure(job_id, "timed_out", reason, overdue.scorer, started_s)
            await self._reap(process)
        except Died as death:
            self.counters["died_busy"] += 1
            reason = f"{death.reason} in {death.scorer}" if death.scorer else death.reason
            outcome = self._failure(job_id, "crashed", reason, death.scorer, started_s)
            await self._reap(process)
        except BaseException:  # cancelled: the pending answer must not be taken for the next job's
            process.kill_now()
            self._remove(process)
            raise
        else:
            await self._give_back(process)
        return outcome

    async def close(self) -> None:
        """Kill every process with its descendants."""
        for process in list(self._processes.values()):
            process.kill_now()
            self._remove(process)
        self._hosts.close()
        await process_tree.kill_orphans(self._others | self._neighbours())

    # ------------------------------------------------------------ one process

    @staticmethod
    def _failure(job_id: int, kind: str, reason: str, scorer: str, started_s: float) -> Outcome:
        spent = {scorer: time.monotonic() - started_s} if scorer else {}
        return Outcome(job_id=job_id, kind=kind, reason=reason, scorer=scorer, scorer_s=spent)

    async def _start_one(self) -> Ready:
        process = ScoringProcess.spawn(self._output_log)
        self._processes[process.pid] = process
        try:
            ready = await process.prepare(self._setup, START_TIMEOUT_S)
        except asyncio.CancelledError:
            process.kill_now()
            self._processes.pop(process.pid, None)
            raise
        except (Died, UserError):
            await self._reap(process)
            raise
        self.counters["started"] += 1
        self._num_failed_starts = 0
        await self._offer(process)
        return ready

    async def _offer(self, process: ScoringProcess) -> None:
        self._busy.discard(process)
        async with self._idle_came:
            self._idle.append(process)
            self._idle_came.notify()

    async def _take_idle(self) -> ScoringProcess:
        try:
            async with asyncio.timeout(IDLE_WAIT_S), self._idle_came:
                while True:
                    await self._idle_came.wait_for(lambda: bool(self._idle))
                    process = self._idle.popleft()
                    self._busy.add(process)
                    if process.check():
                        return process
                    self.counters["died_idle"] += 1
                    await self._reap(process)
        except TimeoutError:
            raise DeadlineExceeded("an idle scoring process", "the pool's refill", IDLE_WAIT_S) from None

    async def _give_back(self, process: ScoringProcess) -> None:
        if process.leftover_processes():
            self.counters["left_children"] += 1
            log.warning(
                "a scorer left processes running; these are killed together with scoring process %d", process.pid
            )
            await self._reap(process)
        elif process.num_scored >= self._settings.recycle_after:
            self.counters["recycled"] += 1
            await self._reap(process)
        elif not process.check() or process.killed_because:
            await self._reap(process)
        else:
            await self._offer(process)

    def _remove(self, process: ScoringProcess) -> None:
        self._busy.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self._processes.pop(process.pid, None)
        self._lost.set()

    async def _reap(self, process: ScoringProcess) -> None:
        """Kill it with its descendants, including orphans, and notify the refill."""
        self._busy.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self._lost.set()  # a new process starts while this one is being killed
        await process.kill()
        self._processes.pop(process.pid, None)
        await process_tree.kill_orphans(self._others | self.pids | self._neighbours())

    # ------------------------------------------------------------ loops

    async def _refill(self) -> None:
        starting: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for _ in range(self._target - self.num_ready - len(starting)):
                    task = tasks.create_task(self._start_again(), name="scoring process start")
                    starting.add(task)
                    task.add_done_callback(starting.discard)
                    task.add_done_callback(lambda _: self._lost.set())
                self._lost.clear()
                with contextlib.suppress(TimeoutError):  # nothing is due while the pool is full; check again anyway
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await self._lost.wait()

    async def _start_again(self) -> None:
        if self._num_failed_starts:
            await asyncio.sleep(min(5.0, 0.1 * 2**self._num_failed_starts))
        try:
            await self._start_one()
        except (Died, UserError) as error:
            self.counters["failed_starts"] += 1
            self._num_failed_starts += 1
            log.error("a scoring process did not start (consecutive failures: %d): %s", self._num_failed_starts, error)
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                raise OperationError(f"scoring processes can no longer be started: {error}") from error

    async def _watch(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(WATCH_S)
            turn += 1
            for process in list(self._processes.values()):
                is_idle = process in self._idle
                if not process.check():
                    if is_idle:
                        self.counters["died_idle"] += 1
                        log.warning("scoring process %d died while idle", process.pid)
                        await self._reap(process)
                elif turn % MEMORY_EVERY == 0 and not process.killed_because:
                    await self._check_memory(process, is_idle)

    async def _check_memory(self, process: ScoringProcess, is_idle: bool) -> None:
        used_bytes = process_tree.tree_holds_more_than(process.pid, self._max_bytes)
        if not used_bytes:
            return
        self.counters["killed_memory"] += 1
        limit_mb = self._settings.max_memory_mb
        process.killed_because = (
            f"the scoring process used {used_bytes >> 20} MB, which is more than max_memory_mb {limit_mb}"
        )
        log.warning("%s; killing it", process.killed_because)
        if is_idle and process in self._idle:
            await self._reap(process)
        else:
            process_tree.kill_tree_now(process.pid)  # its exchange detects the exit and reaps it
