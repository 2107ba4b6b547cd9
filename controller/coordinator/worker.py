"""Rollout workers and leases as the coordinator knows them, and aggregates over all workers for routing.

With hundreds of workers most events concern one of them. `Workers` therefore updates its lists and sums when a single
worker changes, instead of checking all workers for each event. Code that sets a relevant field of a worker calls
`Workers.changed`; leases are added and removed here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from areal_like.trajectory import NO_VERSION
from areal_like.wire.messages import Purpose
from controller.coordinator.handover import Engine
from controller.coordinator.worker_version import WorkerVersion


@dataclass(slots=True)
class Lease:
    """One attempt at one sample. A void lease belonged to a lost worker; its result is still accepted."""

    lease_id: int
    purpose: Purpose
    group_id: int
    sample_index: int
    worker: str
    min_version: int
    num_prefix: int
    """Tokens of the answer that were known when the lease was made."""
    expected_tokens: float = 0.0
    """Expected remaining tokens, by the length statistics at its last report."""
    is_recalled: bool = False
    is_void: bool = False


@dataclass(slots=True)
class Worker:
    """One rollout worker by name; `incarnation` changes when its process does."""

    name: str
    incarnation: str = ""
    capacity: int = 0
    num_slots: int = 1
    """Part of the capacity: answers generated concurrently."""
    speed: float = 0.0
    """Sampled tokens per busy second; 0: not measured yet."""
    steps_per_s: float = 0.0
    """Tokens per second of one answer in a small batch; 0: not known."""
    load_tokens: float = 0.0
    """Expected remaining tokens of its leases."""
    weights: WorkerVersion = field(default_factory=WorkerVersion)
    """The version it has, and the version on its way to it."""
    outstanding: set[int] = field(default_factory=set)
    voided: set[int] = field(default_factory=set)
    """Leases it had when it was lost; bounded by its capacity."""
    is_present: bool = False
    is_gone: bool = False
    is_external: bool = False
    """The run did not start it: nobody restarts it, and the run must not depend on it."""
    ended_incarnation: str | None = None
    """The process that was last lost permanently. It may differ from `incarnation`: a predecessor, or a successor whose
    Hello is not read yet.
    """
    is_draining: bool = False
    """It is draining, or has drained."""
    engine: Engine = Engine.EMPTY
    """State of its memory on devices shared with the trainer."""
    release_number: int = 0
    """Number of the last request to release its memory; the answer contains the same number."""
    release_due_s: float = math.inf
    """Deadline of the release of its memory."""

    @property
    def free(self) -> int:
        """Credits: samples it can still be leased."""
        return self.capacity - len(self.outstanding)

    @property
    def is_working(self) -> bool:
        """Whether it works, or will when it has loaded a version."""
        return self.is_present and not self.weights.quarantine and not self.is_draining

    @property
    def is_usable(self) -> bool:
        """Whether it may get leases."""
        return self.is_working and self.weights.version >= 0


class Workers(dict[str, "Worker"]):
    """Workers by name, in the order they first joined; the lists below are in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.present: list[Worker] = []
        """Workers that work, or will when they have loaded a version."""
        self.usable: list[Worker] = []
        """Workers that may get leases."""
        self._places: dict[str, int] = {}
        self._seen: dict[str, tuple[bool, bool, float, int, int]] = {}
        """Last known values of each worker: present, usable, speed, version for new work, capacity."""
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
        self.changed(worker)

    def setdefault(self, name: str, default: Worker) -> Worker:
        """The worker of this name; `default` is added if there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    # ------------------------------------------------------------ aggregates for routing

    @property
    def speeds(self) -> tuple[float, float]:
        """Mean and highest measured speed of the present workers; 1 if none is known."""
        if self._speeds is None:
            known = [worker.speed for worker in self.present if worker.speed > 0]
            self._speeds = (sum(known) / len(known) if known else 1.0, max(known, default=1.0))
        return self._speeds

    @property
    def newest(self) -> int:
        """Newest version of a usable worker that is not pinned to an evaluation."""
        if self._newest is None:
            unpinned = (worker.weights.version for worker in self.usable if worker.weights.pin is None)
            self._newest = max(unpinned, default=NO_VERSION)
        return self._newest

    @property
    def capacity(self) -> float:
        """Total capacity of the present workers, in samples."""
        if self._capacity is None:
            self._capacity = float(sum(worker.capacity for worker in self.present))
        return self._capacity

    @property
    def speed_capacity(self) -> float:
        """Total capacity, each multiplied by the worker's speed (the mean if not measured)."""
        if self._speed_capacity is None:
            usual = self.speeds[0]
            self._speed_capacity = sum(worker.capacity * (worker.speed or usual) for worker in self.present)
        return self._speed_capacity

    # ------------------------------------------------------------ updates

    def changed(self, worker: Worker) -> None:
        """Update the lists and sums after `is_present`, `is_draining`, `speed`, `capacity`, or the version, the
        quarantine or the pin of this worker was set. The cost does not depend on the number of workers.
        """
        before = self._seen.get(worker.name, (False, False, 0.0, NO_VERSION, 0))
        is_present = worker.is_working
        is_usable = is_present and worker.weights.version >= 0
        fresh = worker.weights.version if is_usable and worker.weights.pin is None else NO_VERSION
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
        self._credited(worker)

    def book(self, worker: Worker, lease: Lease) -> None:
        """Add a lease to the worker."""
        worker.outstanding.add(lease.lease_id)
        self._credited(worker)

    def unbook(self, worker: Worker, lease: Lease) -> None:
        """Remove a lease from the worker."""
        if lease.lease_id in worker.outstanding:
            worker.outstanding.discard(lease.lease_id)
            self._credited(worker)
            # reset to exactly 0 if nothing is left, so that rounding errors do not accumulate
            worker.load_tokens = worker.load_tokens - lease.expected_tokens if worker.outstanding else 0.0

    def _credited(self, worker: Worker) -> None:
        """Update the list of workers with a credit after a change of this worker."""
        is_open = worker.free > 0 and worker.is_usable
        if is_open == (worker.name in self._open_names):
            return
        if is_open:
            self._open_names.add(worker.name)
        else:
            self._open_names.discard(worker.name)
        self._move(self.open, worker, is_open)

    def _move(self, members: list[Worker], worker: Worker, is_member: bool) -> None:
        place = self._places[worker.name]
        if is_member:
            insort(members, worker, key=lambda one: self._places[one.name])
        else:
            del members[bisect_left(members, place, key=lambda one: self._places[one.name])]
