"""The virtual cluster on a simulated disk: crashes at any change of a file, and disks that fail.

After a crash the controller continues from what the disk holds (disk_ledger.py). The checks of virtual_cluster.py and
ledger_model.py apply to everything that follows, with the model rebuilt from the facts that are left.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from disk_ledger import Case, DiskLedger, FactOf, How, LossReported, Recorders
from real_cluster import RealCluster
from schedules import FAULTLESS, FAULTS, random_settings
from simulated_disk import Image
from virtual_cluster import VirtualCluster

from areal_like.errors import LedgerError
from controller.coordinator.effects import Effect
from controller.coordinator.settings import CoordinatorSettings
from controller.ledger.ledger import Ledger

ACTIONS = (*FAULTLESS, *(fault for fault in FAULTS if fault != "reject_one"), "copy_log", "fail")


class DiskFailed(Exception):
    """The ledger reported an error of the disk; the controller ends, as a real one does."""


class DiskCluster(RealCluster):
    """One run; each life of its controller has a folder below `folder`, with what the disk of the life before held."""

    def __init__(
        self, settings: CoordinatorSettings, rng: random.Random, *, folder: Path, recorders: Recorders, how: How,
        fsync: bool, disk_rng: random.Random, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.found: Counter[str] = Counter()
        self.case = Case(settings, recorders, how, fsync, disk_rng, self.found)
        self._folders = (folder / str(number) for number in itertools.count())
        first = next(self._folders)
        first.mkdir()
        self.on_disk = DiskLedger(first, self.case)
        VirtualCluster.__init__(self, settings, rng, **{**kwargs, "mirror": self._mirror})

    @property
    def real(self) -> Ledger:  # type: ignore[override]
        """The open ledger."""
        return self.on_disk.real

    def _mirror(self, entries: list[FactOf]) -> None:
        try:
            self.on_disk.apply(entries)
        except LedgerError as error:
            raise DiskFailed from error

    def _carry_out(self, effect: Effect) -> None:
        try:
            super()._carry_out(effect)
        except LedgerError as error:
            self.case.recorders.check()
            if self.on_disk.disk.fault is None:
                raise
            self.found["failed purges"] += 1
            raise DiskFailed from error

    def copy_log(self) -> None:
        """The thread that copies the log has its turn."""
        self.on_disk.copy_log()

    def fail(self) -> None:
        """The disk fails within the next changes."""
        self.on_disk.disk.fault = self.case.draw_fault()

    def crash(self) -> None:
        """Process or machine die at a change of the disk: one of the event in progress, or any of this life."""
        rng, changes = self.case.rng, self.on_disk.disk.changes
        start = len(changes)
        if self.letters and self.end is None:
            _, event, tokens = self.letters.pop(0)
            self.handle(event, tokens, is_sent=rng.random() < 0.5)
        if rng.random() < 0.3:
            self.copy_log()
        if rng.random() < 0.3:
            start = 0
        at = rng.randint(start, len(changes))
        self._go_on(self.on_disk.image(at), self.on_disk.allowed(at))

    def end_by_fault(self) -> None:
        """The ledger is closed, the run ends, the disk is repaired, and the run is resumed."""
        self.found["ends by a fault"] += 1
        before = self.on_disk
        if self.case.rng.random() < 0.5:
            before.disk.fault = None
        before.close()
        at = len(before.disk.changes)
        self._go_on(before.disk.after_kill(at, self.case.rng), {before.num_facts, len(before.history)})

    def _go_on(self, image: Image, allowed: set[int]) -> None:
        """Start the controller again on this disk. Raises LossReported."""
        before = self.on_disk
        self.case.recorders.attach(None)
        before.close()  # its folder is not looked at again
        self.on_disk = before.next_life(image, allowed, next(self._folders), has_faults=self.case.rng.random() < 0.2)
        self.ledger = self.on_disk.model()
        self.ledger.is_purged = True
        self.damaged.clear()
        VirtualCluster.restart(self, self.real.load)

    def check_states(self, num: int) -> int:
        """Check the ledger of `num` crashes at random changes of this life. Returns how many losses were reported."""
        before, num_reported = self.on_disk, 0
        self.case.recorders.attach(None)
        for _ in range(num):
            at = self.case.rng.randint(0, len(before.disk.changes))
            image, allowed = before.image(at), before.allowed(at)
            try:
                before.next_life(image, allowed, next(self._folders)).close()
            except LossReported:
                num_reported += 1
        self.found["reported losses"] += num_reported
        return num_reported


def run_on_disk(
    seed: int, folder: Path, recorders: Recorders, *, how: How, fsync: bool, num_actions: int = 80, num_states: int = 0
) -> DiskCluster:
    """One seeded schedule with crashes and faults of the disk, then calm until the end.

    num_states: crashes that are only checked, at random changes of its last life. Raises LossReported where that may
    happen.
    """
    rng, disk_rng = random.Random(seed), random.Random(f"disk {seed}")
    num_workers = rng.randint(1, 3)
    settings = msgspec.structs.replace(random_settings(rng), num_workers=num_workers)
    cluster = DiskCluster(
        settings, rng, folder=folder, recorders=recorders, how=how, fsync=fsync, disk_rng=disk_rng,
        num_workers=num_workers, capacity=rng.choice([1, 2, 4, 9]), segment_tokens=rng.choice([0, 0, 2]),
        failure_rate=rng.choice([0.0, 0.1]), equal_rate=rng.choice([0.0, 0.3]),
    )  # fmt: skip
    try:
        fault, crash, fail = rng.choice([0.0, 0.15, 0.4]), rng.choice([0.3, 1.0]), rng.choice([0.0, 0.5, 1.0])
        weights = [fault if action in FAULTS else 1.0 for action in ACTIONS]
        weights[ACTIONS.index("crash")], weights[ACTIONS.index("fail")] = crash, fail
        for action in rng.choices(ACTIONS, weights, k=num_actions):
            try:
                if cluster.end is None:
                    getattr(cluster, action)()
            except DiskFailed:
                cluster.end_by_fault()
        cluster.on_disk.disk.fault = None
        cluster.run_to_end()
        cluster.check_end()
        cluster.copy_log()
        cluster.on_disk.check()
        cluster.check_states(num_states)
    finally:
        recorders.attach(None)
        cluster.on_disk.close()
    return cluster
