"""Which policy version this worker samples with: the gate samples wait at, and the loop that swaps versions.

Owns: `VersionGate`, `VersionLoader`. Refuses: samples (the worker parks them), sockets (it is given `report`).

A version that is not newer than the loaded one is a rollback: the trainer fell back to a checkpoint. Answers already
begun may hold tokens of the abandoned, higher versions, and versions never decrease along an answer
(`stamped-versions`), so everything that runs is parked first: it keeps its tokens and waits until its version exists
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from areal_like.errors import DeadlineExceeded, EngineError, TransferBroken, UserError, WeightError, WeightsDamaged
from areal_like.trace import Tracer
from areal_like.wire.messages import (
    AnnounceVersion,
    MemoryReleased,
    SwapVersion,
    VersionFailed,
    VersionLoaded,
    VersionStaged,
)
from rollout.activity import WorkerActivity
from rollout.config import Interruption
from rollout.engine.port import Engine, LoadReport
from rollout.weights.port import JoinAs, Receiver

log = logging.getLogger(__name__)

Load = Callable[[Interruption], Awaitable[LoadReport]]
Result = TypeVar("Result")
TURN_S = 600.0
"""Longest wait of a staged version for its turn: far more than a round of all workers takes."""


class VersionGate:
    """Lets a sample through once the engine samples with `min_version` or newer. `version` -1: nothing may pass."""

    def __init__(self) -> None:
        self.version = -1
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def set(self, version: int) -> None:
        """The engine now samples with `version` (-1 while it must sample with none)."""
        self.version = version
        for min_version, waiter in self._waiting:
            if version >= min_version and not waiter.done():
                waiter.set_result(None)

    async def wait(self, min_version: int, deadline_s: float) -> None:
        """Return once `version >= max(min_version, 0)`. Raises DeadlineExceeded after `deadline_s`."""
        needed = max(min_version, 0)
        try:
            async with asyncio.timeout(deadline_s):
                while self.version < needed:
                    entry = (needed, asyncio.get_running_loop().create_future())
                    self._waiting.append(entry)
                    try:
                        await entry[1]
                    finally:
                        self._waiting.remove(entry)
        except TimeoutError:
            raise DeadlineExceeded(f"policy version {needed}", "controller", deadline_s) from None


class _Void(Exception):
    """The sender of this version is gone, or the memory it needs is wanted by others."""


class VersionLoader:
    """Loads announced versions, one at a time; of several waiting announcements only the newest is loaded."""

    def __init__(
        self,
        *,
        engine: Engine,
        gate: VersionGate,
        interruption: Interruption,
        report: Callable[[VersionStaged | VersionLoaded | VersionFailed | MemoryReleased], None],
        park_all: Callable[[], None],
        doing: WorkerActivity,
        tracer: Tracer,
        receiver: Receiver | None = None,
        on_swapped: Callable[[Path, int], Awaitable[None]] | None = None,
    ) -> None:
        """`receiver` None: versions are announced by the paths of their full manifests only. on_swapped: called with
        the manifest of a version from files once it is in use, and waited for before that is reported: until then the
        files stay.
        """
        self._on_swapped = on_swapped
        self._engine, self._gate, self._interruption = engine, gate, interruption
        self._report, self._park_all = report, park_all
        self._doing, self._tracer = doing, tracer
        self._receiver = receiver
        self._target: AnnounceVersion | None = None
        self._wake = asyncio.Event()
        self._turn: tuple[int, str] | None = None
        """Version and lineage we were asked to swap in."""
        self._turn_wake = asyncio.Event()
        self.loaded: tuple[int, str] | None = None
        """Version and lineage now in use."""
        self._num_loaded = 0
        self._num_failed = 0
        self._num_superseded = 0
        self._num_broken = 0
        self._called: tuple[int, str] | None = None
        """Version and lineage the group was last called for: a second time it comes as a stream."""
        self._release_number: int | None = None
        """Of the newest request to release memory that is not answered."""

    def announce(self, message: AnnounceVersion) -> None:
        """A version was announced; the newest announcement wins."""
        if self._target is not None:
            self._num_superseded += 1
        self._target = message
        self._wake.set()
        self._turn_wake.set()

    def swap(self, message: SwapVersion) -> None:
        """It is our turn to swap in what we have staged."""
        self._turn = (message.version, message.lineage)
        self._turn_wake.set()

    def release(self, number: int) -> None:
        """The engine's memory is wanted by others: give it back, and answer with the number of the request.

        A version announced before is void: loading it would take the memory again. One that the engine is already
        loading is loaded first. One announced afterwards waits for the release.
        """
        self._release_number, self._target = number, None
        self._wake.set()
        self._turn_wake.set()

    @property
    def is_release_due(self) -> bool:
        """Memory was asked for and has not been released."""
        return self._release_number is not None

    def report_again(self) -> None:
        """Tell once more which version is in use, if any is."""
        if self.loaded is not None:
            version, lineage = self.loaded
            self._report(VersionLoaded(version=version, lineage=lineage, stage_s=0.0, pause_s=0.0))

    def counters(self) -> dict[str, float]:
        """Versions loaded, failed, superseded before their turn, and broken off; what the receiver counts."""
        received = self._receiver.counters() if self._receiver is not None else {}
        return {
            **received,
            "versions_loaded": float(self._num_loaded),
            "versions_failed": float(self._num_failed),
            "versions_superseded": float(self._num_superseded),
            "versions_broken": float(self._num_broken),
        }

    async def run(self) -> None:
        """Load indefinitely. Stop: cancelled by the worker. Waker: `announce`. Raises EngineError when the engine
        broke.
        """
        async with asyncio.TaskGroup() as group:
            if self._receiver is not None:
                group.create_task(self._receiver.run(), name="weights:serve")
            await self._load_indefinitely()

    async def _load_indefinitely(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._release_number is not None:  # every one of them came before what is announced now
                await self._release(self._release_number)
            target, self._target = self._target, None
            if target is not None:
                await self._load(target)

    async def _release(self, number: int) -> None:
        """Samples wait for a version from now on; the next announcement brings one, whichever it is.

        A request that comes meanwhile is answered by itself.
        """
        self._gate.set(-1)
        self._park_all()
        started_s = self._tracer.now_s()
        num_bytes = await self._engine.release_memory()
        self.loaded = None
        ended_s = self._tracer.now_s()
        self._tracer.complete("release_memory", started_s, ended_s, "versions", num_bytes=num_bytes)
        log.info("released %d bytes in %.3f s", num_bytes, ended_s - started_s)
        if self._release_number == number:
            self._release_number = None
        self._report(MemoryReleased(number=number, num_bytes=num_bytes, seconds=ended_s - started_s))

    async def _load(self, target: AnnounceVersion) -> None:
        if self.loaded == (target.version, target.lineage):  # asked again, e.g. by a controller that missed our answer
            self.report_again()
            return
        try:
            if await self._came_by_group(target):
                return
            started_s = self._tracer.now_s()
            manifest_path = await self._unless_void(target, self._receive(target))
            arrived_s = self._tracer.now_s() - started_s if self._receiver is not None else 0.0
            if not await self._has_turn(target):
                self._num_superseded += 1
                return
        except _Void:
            self._num_superseded += 1
            return
        except WeightError as error:
            if self._receiver is not None and isinstance(error, WeightsDamaged):
                self._receiver.forget()  # what is here may be the damaged part
            await self._failed(target, error)
            return
        self._doing.loading(True)
        try:
            await self._swap(target, partial(self._engine.load_version, manifest_path), arrived_s, manifest_path)
        finally:
            self._doing.loading(False)

    async def _came_by_group(self, target: AnnounceVersion) -> bool:
        """Take the version by the process group, if the trainer calls us to one.

        False where it is available otherwise: the group is for who comes in time, and any failure of it ends there. A
        payload that arrived damaged is the worker's failure, and said as such.
        """
        can = self._engine.capabilities
        wanted = (target.version, target.lineage)
        if self._receiver is None or not can.group_ranks or target.is_held or self._called == wanted:
            return False
        started_s = self._tracer.now_s()
        who = JoinAs(can.group_ranks, can.device)
        call = await self._unless_void(target, self._receiver.meet(target.manifest_path, target.deadline_s / 2, who))
        if call is None:
            return False
        self._called = wanted
        waited_s = self._tracer.now_s() - started_s
        self._doing.loading(True)
        try:
            await self._swap(target, partial(self._engine.load_from_group, call), waited_s)
        except TransferBroken as error:
            self._num_broken += 1
            log.warning("version %d is fetched as a stream: %s", target.version, error)
            return False
        finally:
            self._doing.loading(False)
        return True

    async def _unless_void(self, target: AnnounceVersion, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which fetches `target`. Raises _Void once a version of another lineage is announced,
        or memory is to be released.

        The trainer that was to send this one is gone, or waits for the memory: waiting for the version to the deadline
        would hold everybody up.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                is_replaced = self._target is not None and self._target.lineage != target.lineage
                if is_replaced or self.is_release_due:
                    raise _Void
                self._turn_wake.clear()
                waker = asyncio.ensure_future(self._turn_wake.wait())
                try:
                    await asyncio.wait({task, waker}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waker.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _receive(self, target: AnnounceVersion) -> Path:
        if self._receiver is None:
            return Path(target.manifest_path)
        return await self._receiver.receive(target.manifest_path, target.deadline_s)

    async def _has_turn(self, target: AnnounceVersion) -> bool:
        """Wait for the turn of a held version; False when a newer announcement came first. Raises WeightError."""
        if not target.is_held:
            return True
        self._report(VersionStaged(version=target.version, lineage=target.lineage))
        try:
            async with asyncio.timeout(TURN_S):
                while self._turn != (target.version, target.lineage):
                    if self.is_release_due:
                        raise _Void
                    if self._target is not None and (again := self._said_again(target)) is not None:
                        return again
                    self._turn_wake.clear()
                    await self._turn_wake.wait()
        except TimeoutError:
            raise WeightError(f"staged, but received no order to swap it in for {TURN_S:g} s") from None
        return True

    def _said_again(self, target: AnnounceVersion) -> bool | None:
        """What an announcement that came while `target` waited means for it: False: drop it, True: swap, None: wait."""
        assert self._target is not None, "asked without an announcement"
        if (self._target.version, self._target.lineage) != (target.version, target.lineage):
            return False
        is_held, self._target = self._target.is_held, None
        if not is_held:
            return True
        self._report(VersionStaged(version=target.version, lineage=target.lineage))
        return None

    async def _swap(
        self, target: AnnounceVersion, load: Load, arrived_s: float, manifest_path: Path | None = None
    ) -> None:
        """Raises TransferBroken: nothing was said, another way may do."""
        if self.loaded is not None and target.version <= self.loaded[0]:
            log.warning("rollback from version %d to %d of lineage %s", self.loaded[0], target.version, target.lineage)
            self._gate.set(-1)
            self._park_all()
            await asyncio.sleep(0)  # the engine learns of it before the swap
        started_s = self._tracer.now_s()
        try:
            report = await load(self._interruption)
        except TransferBroken:
            self._gate.set(self._engine.version)
            raise
        except WeightError as error:
            if self._receiver is not None:
                self._receiver.forget()
            await self._failed(target, error)
            return
        except (EngineError, UserError):  # the latter: of a server that comes up with its first version
            raise
        except Exception as error:  # whatever else an engine raises, it is broken: the process restarts
            raise EngineError(f"loading version {target.version}: {type(error).__name__}: {error}") from error
        self.loaded = (target.version, target.lineage)
        self._num_loaded += 1
        self._gate.set(self._engine.version)
        self._doing.swapped(report.pause_s)
        self._trace(target, started_s, report.stage_s, report.pause_s)
        stage_s = arrived_s + report.stage_s
        log.info("version %d loaded (staged %.3f s, paused %.3f s)", target.version, stage_s, report.pause_s)
        if manifest_path is not None and self._on_swapped is not None:
            await self._on_swapped(manifest_path, target.version)
        self._report(
            VersionLoaded(version=target.version, lineage=target.lineage, stage_s=stage_s, pause_s=report.pause_s)
        )

    async def _failed(self, target: AnnounceVersion, error: WeightError) -> None:
        """The old version stays in use. Nothing is said of a version that a newer announcement replaced meanwhile."""
        self._gate.set(self._engine.version)
        if self._target is not None:
            self._num_superseded += 1
            return
        self._num_failed += 1
        log.warning("version %d could not be loaded, going on with %d: %s", target.version, self._engine.version, error)
        is_damaged = isinstance(error, WeightsDamaged)
        self._report(
            VersionFailed(version=target.version, lineage=target.lineage, reason=str(error), is_damaged=is_damaged)
        )

    def _trace(self, target: AnnounceVersion, started_s: float, stage_s: float, pause_s: float) -> None:
        ended_s = self._tracer.now_s()
        swap_s = max(started_s, ended_s - pause_s)
        self._tracer.complete("load_version", started_s, ended_s, "versions", version=target.version)
        self._tracer.complete("stage", started_s, min(started_s + stage_s, swap_s), "versions", version=target.version)
        self._tracer.complete("pause", swap_s, ended_s, "versions", version=target.version)
