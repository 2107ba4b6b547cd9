"""An engine whose loads and releases end when the schedule says so, and which accounts for the shared device's memory.

Also contains the event loop of all loaders. linked_cluster.py chooses which load or release ends when.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from virtual_cluster import VirtualWorker

from areal_like.errors import WeightError
from rollout.engine.port import EngineCapabilities, LoadReport

if TYPE_CHECKING:
    from linked_cluster import LinkedCluster

LOOP = asyncio.new_event_loop()
"""Runs the loaders of all schedules, only inside `spin`."""

CAPABILITIES = EngineCapabilities(
    num_slots=1, max_context=9, interruptions=("recompute",), per_request_seed=True, group_ranks=0
)


async def _pass_control() -> None:
    ready = vars(LOOP)["_ready"]
    while ready:  # what tasks have made ready, and nobody has run yet
        await _give_way()


async def _give_way() -> None:
    await asyncio.sleep(0)


def spin() -> None:
    """Let every loader go on until it waits for its engine or for a message."""
    LOOP.run_until_complete(_pass_control())


class AccountedEngine:
    """Loads and releases last until the schedule ends them."""

    capabilities = CAPABILITIES

    def __init__(self, cluster: LinkedCluster, worker: VirtualWorker) -> None:
        self._cluster, self._worker = cluster, worker
        self.version = -1
        self.is_failing = self.is_stuck = self.is_hung = False
        """The next load fails; no release ends; no load ends."""
        self.is_releasing = False
        self._step: asyncio.Future[None] | None = None

    async def load_version(self, manifest_path: Path, interruption: str) -> LoadReport:
        self._worker.has_memory = True
        self._cluster.check_memory()
        await self._wait_for_the_schedule()
        while self.is_hung:
            await self._wait_for_the_schedule()
        if self.is_failing:
            self.is_failing = False
            raise WeightError("checksum differs")
        self.version = self._worker.version = int(manifest_path.name.rpartition("v")[2])
        return LoadReport(version=self.version, stage_s=0.0, pause_s=0.0)

    async def release_memory(self) -> int:
        if any(self._cluster.coordinator.is_live(lease_id) for lease_id in self._worker.tasks):
            self._cluster.complaints.append("memory was asked for while answers run")
        self._worker.version, self.is_releasing = -1, True
        await self._wait_for_the_schedule()
        while self.is_stuck:
            await self._wait_for_the_schedule()
        self.version, self._worker.has_memory, self.is_releasing = -1, False, False
        return 1

    @property
    def is_busy(self) -> bool:
        """A load or a release is under way."""
        return self._step is not None and not self._step.done()

    async def _wait_for_the_schedule(self) -> None:
        self._step = LOOP.create_future()
        await self._step

    def go_on(self) -> None:
        """The load or release under way ends."""
        if self.is_busy:
            assert self._step is not None
            self._step.set_result(None)
            spin()
