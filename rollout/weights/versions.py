"""The policy version of a worker: the gate at which samples wait, and the loop that swaps versions.

The worker parks samples. Reports are sent through `report`.

A version that is not newer than the loaded one is a rollback: the trainer returned to a checkpoint. Running answers may
have tokens of the abandoned, higher versions, and versions never decrease along an answer (`stamped-versions`), so all
running samples are parked first: they keep their tokens and wait until their version exists again.
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
"""Longest wait of a staged version for its turn: far longer than the turns of all workers take."""


class VersionGate:
    """Lets a sample through once the engine samples with `min_version` or newer. `version` -1: no sample may pass."""

    def __init__(self) -> None:
        self.version = -1
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def set(self, version: int) -> None:
        """Set the version that the engine samples with (-1: none)."""
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


class _Superseded(Exception):
    """The sender of this version has exited, or its memory must be released."""


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
        the manifest of a version from files once it is in use, and awaited before that is reported; the files exist
        until then.
        """
        self._on_swapped = on_swapped
        self._engine, self._gate, self._interruption = engine, gate, interruption
        self._report, self._park_all = report, park_all
        self._doing, self._tracer = doing, tracer
        self._receiver = receiver
        self._target: AnnounceVersion | None = None
        self._wake = asyncio.Event()
        self._turn: tuple[int, str] | None = None
        """Version and lineage for which SwapVersion was received."""
        self._turn_wake = asyncio.Event()
        self.loaded: tuple[int, str] | None = None
        """Version and lineage now in use."""
        self._num_loaded = 0
        self._num_failed = 0
        self._num_superseded = 0
        self._num_broken = 0
        self._called: tuple[int, str] | None = None
        """Version and lineage of the last group call; a second announcement is fetched as a stream."""
        self._release_number: int | None = None
        """Number of the newest unanswered request to release memory."""

    def announce(self, message: AnnounceVersion) -> None:
        """Handle an announced version; the newest announcement counts."""
        if self._target is not None:
            self._num_superseded += 1
        self._target = message
        self._wake.set()
        self._turn_wake.set()

    def swap(self, message: SwapVersion) -> None:
        """Swap in the staged version, because it is this worker's turn."""
        self._turn = (message.version, message.lineage)
        self._turn_wake.set()

    def release(self, number: int) -> None:
        """Release the engine's memory, and answer with the number of the request.

        A version that was announced before is dropped, because loading it would allocate the memory again. A version
        that the engine is already loading is loaded first. One that is announced afterwards waits for the release.
        """
        self._release_number, self._target = number, None
        self._wake.set()
        self._turn_wake.set()

    @property
    def is_release_due(self) -> bool:
        """Whether a request to release memory is pending."""
        return self._release_number is not None

    def report_again(self) -> None:
        """Report again which version is in use, if any."""
        if self.loaded is not None:
            version, lineage = self.loaded
            self._report(VersionLoaded(version=version, lineage=lineage, stage_s=0.0, pause_s=0.0))

    def counters(self) -> dict[str, float]:
        """Number of versions loaded, failed, superseded before their turn, and cancelled; and the receiver's
        counters.
        """
        received = self._receiver.counters() if self._receiver is not None else {}
        return {
            **received,
            "versions_loaded": float(self._num_loaded),
            "versions_failed": float(self._num_failed),
            "versions_superseded": float(self._num_superseded),
            "versions_broken": float(self._num_broken),
        }

    async def run(self) -> None:
        """Load versions until cancelled by the worker, woken by `announce`. Raises EngineError if the engine failed."""
        async with asyncio.TaskGroup() as group:
            if self._receiver is not None:
                group.create_task(self._receiver.run(), name="weights:serve")
            await self._load_indefinitely()

    async def _load_indefinitely(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._release_number is not None:  # all of them arrived before the current announcement
                await self._release(self._release_number)
            target, self._target = self._target, None
            if target is not None:
                await self._load(target)

    async def _release(self, number: int) -> None:
        """Release the memory; samples wait for a version until the next announcement.

        A request that arrives meanwhile is answered separately.
        """
        self._gate.set(-1)
        self._park_all()
        started_s = self._tracer.now_s()
        num_bytes = await self._engine.release_memory()
        self.loaded = None
        ended_s = self._tracer.now_s()
        self._tracer.complete("release_memory", started_s, ended_s, "versions", num_bytes=num_bytes)
        log.info("the engine released %d bytes of memory in %.3f s", num_bytes, ended_s - started_s)
        if self._release_number == number:
            self._release_number = None
        self._report(MemoryReleased(number=number, num_bytes=num_bytes, seconds=ended_s - started_s))

    async def _load(self, target: AnnounceVersion) -> None:
        if self.loaded == (
            target.version,
            target.lineage,
        ):  # announced again, e.g. by a controller that missed the report
            self.report_again()
            return
        try:
            if await self._received_by_group(target):
                return
            started_s = self._tracer.now_s()
            manifest_path = await self._unless_superseded(target, self._receive(target))
            arrived_s = self._tracer.now_s() - started_s if self._receiver is not None else 0.0
            if not await self._has_turn(target):
                self._num_superseded += 1
                return
        except _Superseded:
            self._num_superseded += 1
            return
        except WeightError as error:
            if self._receiver is not None and isinstance(error, WeightsDamaged):
                self._receiver.forget()  # the local base may be the damaged part
            await self._failed(target, error)
            return
        self._doing.loading(True)
        try:
            await self._swap(target, partial(self._engine.load_version, manifest_path), arrived_s, manifest_path)
        finally:
            self._doing.loading(False)

    async def _received_by_group(self, target: AnnounceVersion) -> bool:
        """Receive the version through the process group, if the trainer calls this worker.

        Returns False if it must be fetched in another way: if the worker is too late, or the group failed. A damaged
        payload is reported as a failure of the worker.
        """
        can = self._engine.capabilities
        wanted = (target.version, target.lineage)
        if self._receiver is None or not can.group_ranks or target.is_held or self._called == wanted:
            return False
        started_s = self._tracer.now_s()
        who = JoinAs(can.group_ranks, can.device)
        call = await self._unless_superseded(
            target, self._receiver.meet(target.manifest_path, target.deadline_s / 2, who)
        )
        if call is None:
            return False
        self._called = wanted
        waited_s = self._tracer.now_s() - started_s
        self._doing.loading(True)
        try:
            await self._swap(target, partial(self._engine.load_from_group, call), waited_s)
        except TransferBroken as error:
            self._num_broken += 1
            log.warning("version %d is transferred as a stream, not through a process group: %s", target.version, error)
            return False
        finally:
            self._doing.loading(False)
        return True

    async def _unless_superseded(self, target: AnnounceVersion, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, which fetches `target`. Raises _Superseded once a version of another lineage is announced, or
        memory must be released.

        Then the trainer that should send this version has exited, or waits for the memory: waiting for the version
        until the deadline would delay all workers.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                is_replaced = self._target is not None and self._target.lineage != target.lineage
                if is_replaced or self.is_release_due:
                    raise _Superseded
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
        """Wait for the turn of a held version; False if a newer announcement arrives first. Raises WeightError."""
        if not target.is_held:
            return True
        self._report(VersionStaged(version=target.version, lineage=target.lineage))
        try:
            async with asyncio.timeout(TURN_S):
                while self._turn != (target.version, target.lineage):
                    if self.is_release_due:
                        raise _Superseded
                    if self._target is not None and (again := self._newer_announcement(target)) is not None:
                        return again
                    self._turn_wake.clear()
                    await self._turn_wake.wait()
        except TimeoutError:
            raise WeightError(
                f"the version was staged, but no request to load it arrived within {TURN_S:g} s"
            ) from None
        return True

    def _newer_announcement(self, target: AnnounceVersion) -> bool | None:
        """Effect of an announcement that arrived while `target` waited: False: drop it, True: swap, None: wait."""
        assert self._target is not None, "called without an announcement"
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
        """Swap the version in and report it. Raises TransferBroken: nothing was reported, another transfer may work."""
        if self.loaded is not None and target.version <= self.loaded[0]:
            log.warning(
                "returning from version %d to version %d of lineage %s", self.loaded[0], target.version, target.lineage
            )
            self._gate.set(-1)
            self._park_all()
            await asyncio.sleep(0)  # the engine is notified before the swap
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
        except (EngineError, UserError):  # UserError: from a server that starts with its first version
            raise
        except Exception as error:  # after any other exception the engine is unusable: the process restarts
            raise EngineError(f"cannot load version {target.version}: {type(error).__name__}: {error}") from error
        self.loaded = (target.version, target.lineage)
        self._num_loaded += 1
        self._gate.set(self._engine.version)
        self._doing.swapped(report.pause_s)
        self._trace(target, started_s, report.stage_s, report.pause_s)
        stage_s = arrived_s + report.stage_s
        log.info(
            "loaded version %d (staging took %.3f s, generation was paused for %.3f s)",
            target.version,
            stage_s,
            report.pause_s,
        )
        if manifest_path is not None and self._on_swapped is not None:
            await self._on_swapped(manifest_path, target.version)
        self._report(
            VersionLoaded(version=target.version, lineage=target.lineage, stage_s=stage_s, pause_s=report.pause_s)
        )

    async def _failed(self, target: AnnounceVersion, error: WeightError) -> None:
        """Report the failure; the old version stays in use. A version that a newer announcement has replaced is not
        reported."""
        self._gate.set(self._engine.version)
        if self._target is not None:
            self._num_superseded += 1
            return
        self._num_failed += 1
        log.warning(
            "version %d could not be loaded; continuing with version %d: %s",
            target.version,
            self._engine.version,
            error,
        )
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
