"""Which policy version this worker samples with: the gate samples wait at, and the loop that swaps versions.

Owns: `VersionGate`, `VersionLoader`. Refuses: samples (the worker parks them), sockets (it is given `report`).

A version that is not newer than the loaded one is a rollback: the trainer fell back to a checkpoint. Answers already
begun may hold tokens of the abandoned, higher versions, and versions never decrease along an answer (law 5), so
everything that runs is parked first: it keeps its tokens and waits until its version exists again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from areal_like.errors import DeadlineExceeded, EngineError, WeightError
from areal_like.messages import AnnounceVersion, VersionFailed, VersionLoaded
from areal_like.trace import Tracer
from rollout.doing import Doing
from rollout.engine.port import Engine, Interruption

log = logging.getLogger(__name__)


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


class VersionLoader:
    """Loads announced versions, one at a time; of several waiting announcements only the newest is loaded."""

    def __init__(
        self,
        *,
        engine: Engine,
        gate: VersionGate,
        interruption: Interruption,
        report: Callable[[VersionLoaded | VersionFailed], None],
        park_all: Callable[[], None],
        doing: Doing,
        tracer: Tracer,
    ) -> None:
        self._engine, self._gate, self._interruption = engine, gate, interruption
        self._report, self._park_all = report, park_all
        self._doing, self._tracer = doing, tracer
        self._target: AnnounceVersion | None = None
        self._wake = asyncio.Event()
        self.loaded: tuple[int, str] | None = None
        """Version and lineage now in use."""
        self._num_loaded = 0
        self._num_failed = 0
        self._num_superseded = 0

    def announce(self, message: AnnounceVersion) -> None:
        """A version was announced; the newest announcement wins."""
        if self._target is not None:
            self._num_superseded += 1
        self._target = message
        self._wake.set()

    def report_again(self) -> None:
        """Tell once more which version is in use, if any is."""
        if self.loaded is not None:
            version, lineage = self.loaded
            self._report(VersionLoaded(version=version, lineage=lineage, stage_s=0.0, pause_s=0.0))

    def counters(self) -> dict[str, float]:
        """Versions loaded, failed, and superseded before their turn."""
        return {
            "versions_loaded": float(self._num_loaded),
            "versions_failed": float(self._num_failed),
            "versions_superseded": float(self._num_superseded),
        }

    async def run(self) -> None:
        """Load for ever. Stop: cancelled by the worker. Waker: `announce`. Raises EngineError when the engine broke."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            target, self._target = self._target, None
            if target is not None:
                await self._load(target)

    async def _load(self, target: AnnounceVersion) -> None:
        if self.loaded == (target.version, target.lineage):  # asked again, e.g. by a controller that missed our answer
            self.report_again()
            return
        self._doing.loading(True)
        try:
            await self._swap(target)
        finally:
            self._doing.loading(False)

    async def _swap(self, target: AnnounceVersion) -> None:
        if self.loaded is not None and target.version <= self.loaded[0]:
            log.warning("rollback from version %d to %d of lineage %s", self.loaded[0], target.version, target.lineage)
            self._gate.set(-1)
            self._park_all()
            await asyncio.sleep(0)  # the engine hears of it before the swap
        started_s = self._tracer.now_s()
        try:
            report = await self._engine.load_version(Path(target.manifest_path), self._interruption)
        except WeightError as error:
            await self._failed(target, str(error))
            return
        except EngineError:
            raise
        except Exception as error:  # whatever else an engine raises, it is broken: the process restarts
            raise EngineError(f"loading version {target.version}: {type(error).__name__}: {error}") from error
        self.loaded = (target.version, target.lineage)
        self._num_loaded += 1
        self._gate.set(self._engine.version)
        self._doing.swapped(report.pause_s)
        self._trace(target, started_s, report.stage_s, report.pause_s)
        log.info("version %d loaded (staged %.3f s, paused %.3f s)", target.version, report.stage_s, report.pause_s)
        self._report(
            VersionLoaded(
                version=target.version, lineage=target.lineage, stage_s=report.stage_s, pause_s=report.pause_s
            )
        )

    async def _failed(self, target: AnnounceVersion, reason: str) -> None:
        """The old version stays in use. Nothing is said of a version that a newer announcement replaced meanwhile."""
        self._gate.set(self._engine.version)
        if self._target is not None:
            self._num_superseded += 1
            return
        self._num_failed += 1
        log.warning(
            "version %d could not be loaded, going on with %d: %s", target.version, self._engine.version, reason
        )
        self._report(VersionFailed(version=target.version, lineage=target.lineage, reason=reason))

    def _trace(self, target: AnnounceVersion, started_s: float, stage_s: float, pause_s: float) -> None:
        ended_s = self._tracer.now_s()
        swap_s = max(started_s, ended_s - pause_s)
        self._tracer.complete("load_version", started_s, ended_s, "versions", version=target.version)
        self._tracer.complete("stage", started_s, min(started_s + stage_s, swap_s), "versions", version=target.version)
        self._tracer.complete("pause", swap_s, ended_s, "versions", version=target.version)
