"""Rollout workers and leases as the coordinator knows them, and what routing asks of all workers together.

With hundreds of workers most events concern one of them. `Workers` therefore keeps its lists and sums up to date as
single workers change (`Worker.__setattr__`, `credited`) rather than looking at all of them for each event."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from areal_like.trajectory import NO_VERSION
from areal_like.wire.messages import Purpose
from controller.coordinator.handover import Engine

if TYPE_CHECKING:
    from controller.coordinator.eval_job import EvalJob


@dataclass(slots=True)
class Lease:
    """One attempt at one sample. A void lease belonged to a lost worker; its result is still welcome."""

    lease_id: int
    purpose: Purpose
    group_id: int
    sample_index: int
    worker: str
    min_version: int
    num_prefix: int = 0
    """Tokens of the answer that were known when the lease was given."""
    expected_tokens: float = 0.0
    """Still to be sampled, by the length statistics at its last report."""
    is_recalled: bool = False
    is_void: bool = False


@dataclass(slots=True)
class Worker:
    """One rollout worker by name; `incarnation` changes when its process does."""

    name: str
    incarnation: str = ""
    capacity: int = 0
    num_slots: int = 1
    """Of the capacity: answers generated at once."""
    speed: float = 0.0
    """Sampled tokens per busy second; 0: not measured yet."""
    steps_per_s: float = 0.0
    """Tokens per second of one answer in a small batch; 0: not known."""
    load_tokens: float = 0.0
    """Expected tokens of what it holds."""
    version: int = NO_VERSION
    """Loaded."""
    announced: int = NO_VERSION
    """Newest announced to this process."""
    announced_lineage: str = ""
    """Life of the trainer that published it."""
    announced_writing: int = 0
    """How often its files had been written again by then."""
    must_announce_again: bool = False
    """The last announcement may have been lost in a silence: say it again."""
    outstanding: set[int] = field(default_factory=set)
    voided: set[int] = field(default_factory=set)
    """Leases it held when it was lost; bounded by its capacity."""
    is_present: bool = False
    is_gone: bool = False
    is_draining: bool = False
    """It leaves gracefully, or has left."""
    quarantine: str = ""
    """Why it gets no new leases; empty: it does."""
    load_attempts: int = 0
    unloadable: int = NO_VERSION
    """Newest version it failed to load for an evaluation."""
    retry_at_s: float = 0.0
    load_due_s: float = math.inf
    """When the announced version must be staged, or the staged one swapped in."""
    staged: int = NO_VERSION
    """Version it has staged and waits to swap in."""
    has_turn: bool = False
    """It was asked to swap in what it has staged."""
    pin: EvalJob | None = None
    engine: Engine = Engine.EMPTY
    """Its memory on devices that are shared with the trainer."""
    release_number: int = 0
    """Of the last request to release its memory; its answer carries the same."""
    release_due_s: float = math.inf
    """When it must have released its memory."""
    roster: Workers | None = field(default=None, repr=False, compare=False)
    """Who wants to know of changes."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in WATCHED and (roster := getattr(self, "roster", None)) is not None:
            roster.changed(self)

    @property
    def free(self) -> int:
        """Credits: samples it can still be leased."""
        return self.capacity - len(self.outstanding)

    @property
    def is_usable(self) -> bool:
        """May get leases."""
        return self.is_present and not self.quarantine and not self.is_draining and self.version >= 0

    def let_go(self, lease: Lease) -> None:
        """It does not hold this lease any more."""
        if lease.lease_id in self.outstanding:
            self.outstanding.discard(lease.lease_id)
            if self.roster is not None:
                self.roster.credited(self)
            self.load_tokens = self.load_tokens - lease.expected_tokens if self.outstanding else 0.0

    def end_load(self) -> None:
        """No version is under way to this worker."""
        self.staged, self.has_turn, self.load_due_s = NO_VERSION, False, math.inf


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
