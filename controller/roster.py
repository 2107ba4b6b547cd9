"""All rollout workers by name, with what routing asks of all of them kept up to date worker by worker.

Owns: `Workers`: who is present, who is usable, who has a credit, the fastest, the newest version. Refuses: choosing
(routing.py), what a change means (workers.py).

With hundreds of workers most events concern one of them; looking at all for each event would cost more than everything
else together. A worker tells of every change to itself (`Worker.__setattr__`, `credited`), so nothing here goes stale.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from areal_like.trajectory import NO_VERSION

if TYPE_CHECKING:
    from controller.state import Worker

WATCHED = frozenset({"is_present", "is_draining", "quarantine", "version", "pin", "speed", "capacity"})
"""Attributes of a worker that matter here."""


class Workers(dict[str, "Worker"]):
    """By name, in the order they first joined; lists below are in that order too."""

    def __init__(self) -> None:
        super().__init__()
        self.present: list[Worker] = []
        """Those that work, or will once they have loaded a version."""
        self.usable: list[Worker] = []
        """Those that may be leased to at all."""
        self._places: dict[str, int] = {}
        self._seen: dict[str, tuple[bool, bool, float, int, int]] = {}
        """What was last known of each: present, usable, speed, version it takes new work at, capacity."""
        self.open: list[Worker] = []
        """Usable workers with a credit left."""
        self._open_names: set[str] = set()
        self._speeds: tuple[float, float] | None = None
        self._newest: int | None = NO_VERSION
        self._capacity: float | None = None
        self._speed_capacity: float | None = None

    def __setitem__(self, name: str, worker: Worker) -> None:
        self._places.setdefault(name, len(self._places))
        super().__setitem__(name, worker)
        worker.roster = self
        self.changed(worker)

    def setdefault(self, name: str, default: Worker) -> Worker:
        """The worker of this name; `default` becomes it where there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    # ------------------------------------------------------------ what routing asks

    @property
    def speeds(self) -> tuple[float, float]:
        """Mean and highest measured speed of those present; 1 where none is known."""
        if self._speeds is None:
            known = [worker.speed for worker in self.present if worker.speed > 0]
            self._speeds = (sum(known) / len(known) if known else 1.0, max(known, default=1.0))
        return self._speeds

    @property
    def newest(self) -> int:
        """Newest version of a usable worker that is not pinned to an evaluation."""
        if self._newest is None:
            self._newest = max((worker.version for worker in self.usable if worker.pin is None), default=NO_VERSION)
        return self._newest

    @property
    def capacity(self) -> float:
        """Samples that those present may hold."""
        if self._capacity is None:
            self._capacity = float(sum(worker.capacity for worker in self.present))
        return self._capacity

    @property
    def speed_capacity(self) -> float:
        """The same, each times its speed (the usual one where it is not measured)."""
        if self._speed_capacity is None:
            usual = self.speeds[0]
            self._speed_capacity = sum(worker.capacity * (worker.speed or usual) for worker in self.present)
        return self._speed_capacity

    # ------------------------------------------------------------ what workers tell

    def changed(self, worker: Worker) -> None:
        """One of WATCHED was set."""
        before = self._seen.get(worker.name, (False, False, 0.0, NO_VERSION, 0))
        is_present = worker.is_present and not worker.quarantine and not worker.is_draining
        is_usable = is_present and worker.version >= 0
        fresh = worker.version if is_usable and worker.pin is None else NO_VERSION
        now = self._seen[worker.name] = (is_present, is_usable, worker.speed, fresh, worker.capacity)
        if is_present != before[0]:
            self._move(self.present, worker, is_present)
        if is_usable != before[1]:
            self._move(self.usable, worker, is_usable)
        if (is_present, worker.speed, worker.capacity) != (before[0], before[2], before[4]):
            self._speeds = self._capacity = self._speed_capacity = None
        if self._newest is not None and fresh > self._newest:
            self._newest = fresh
        elif now[3] < before[3] and before[3] == self._newest:
            self._newest = None
        self.credited(worker)

    def credited(self, worker: Worker) -> None:
        """The worker got a credit, or spent one."""
        is_open = worker.free > 0 and worker.is_usable
        if is_open != (worker.name in self._open_names):
            (self._open_names.add if is_open else self._open_names.discard)(worker.name)
            self._move(self.open, worker, is_open)

    def _move(self, members: list[Worker], worker: Worker, is_member: bool) -> None:
        place = self._places[worker.name]
        if is_member:
            insort(members, worker, key=lambda one: self._places[one.name])
        else:
            del members[bisect_left(members, place, key=lambda one: self._places[one.name])]
