"""Groups and samples as the coordinator sees them: counts and versions, indexed by first version.

Owns: `Sample`, `Group`, `GroupTable` (live groups only) and their indexes. Refuses: deciding fates, effects.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from areal_like.trajectory import NO_VERSION
from controller.coordinator.sample_outcome import SampleOutcome


@dataclass(slots=True)
class Sample:
    """One sample of a live group: nothing yet, partial (num_tokens > 0) or finished."""

    index: int
    num_tokens: int = 0
    first_version: int = NO_VERSION
    last_version: int = NO_VERSION
    is_finished: bool = False
    is_kept: bool = False
    value: float | None = None
    lease_id: int | None = None
    num_losses: int = 0
    num_moves: int = 0
    """Migrations so far."""
    moving_to: str = ""
    """Worker that it was recalled for."""
    moved_from: str = ""
    """Worker that handed it back gracefully; for the timeline."""

    def finish(self, outcome: SampleOutcome, value: float | None) -> None:
        """Take the outcome over. value: the reward that counts; None: the sample is not kept."""
        self.is_finished, self.is_kept, self.value = True, value is not None, value
        self.num_tokens = outcome.num_tokens
        self.first_version, self.last_version = outcome.first_version, outcome.last_version


@dataclass(slots=True)
class Group:
    """The samples of one prompt, from admission until shipped, dropped or filtered."""

    group_id: int
    version: int
    """Loaded version of the worker it was admitted for: no token of it is older."""
    samples: list[Sample]
    floor: int
    """Lower bound of the first version: samples without tokens count with the admission version."""
    is_ready: bool = False
    home: str = ""
    """Worker that holds its prompt: the group's samples go there where that costs no balance."""
    draw: int = 0
    """Position in the draw order, which says what its row is."""
    leased_at_s: float | None = None
    lease_ids: set[int] = field(default_factory=set)
    """Every lease ever given for it in this life, lost ones included."""

    @property
    def num_finished(self) -> int:
        """Samples whose verdict is in."""
        return sum(sample.is_finished for sample in self.samples)

    @property
    def is_complete(self) -> bool:
        """True where every sample is finished or dropped."""
        return all(sample.is_finished for sample in self.samples)

    @property
    def ceiling(self) -> int | None:
        """Upper bound of the first version: the earliest first token known so far; None where there is none."""
        return min((s.first_version for s in self.samples if s.first_version != NO_VERSION), default=None)

    def min_version(self, sample: Sample) -> int:
        """No further token of `sample` may be older: admission, or the last token of its prefix
        (`stamped-versions`).
        """
        return max(self.version, sample.last_version)


class GroupTable:
    """All live groups, with the indexes that selection and leasing need."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.live: dict[int, Group] = {}
        self.num_ready = 0
        self.num_by_floor: Counter[int] = Counter()
        self.ready_by_floor: dict[int, set[int]] = {}
        self._pending: list[tuple[int, int, int]] = []
        self._timers: list[tuple[float, int]] = []

    @property
    def num_running(self) -> int:
        """Admitted groups with unfinished samples."""
        return len(self.live) - self.num_ready

    def add(self, group_id: int, version: int) -> Group:
        """A new group, none of its samples leased."""
        group = Group(group_id, version, [Sample(index) for index in range(self.group_size)], floor=version)
        self.live[group_id] = group
        self.num_by_floor[version] += 1
        return group

    def remove(self, group: Group) -> None:
        """The group was shipped, dropped or filtered."""
        del self.live[group.group_id]
        self._leave_floor(group)

    def refresh(self, group: Group) -> None:
        """Recompute the floor after a sample's first version became known; a ready group knows all of them."""
        assert not group.is_ready
        floor = min(group.version if s.first_version == NO_VERSION else s.first_version for s in group.samples)
        if floor != group.floor:
            self._leave_floor(group)
            group.floor = floor
            self.num_by_floor[floor] += 1

    def mark_ready(self, group: Group) -> None:
        """Every sample is finished and the group is fit for a batch."""
        group.is_ready = True
        self._enter_ready(group)

    def _enter_ready(self, group: Group) -> None:
        self.num_ready += 1
        self.ready_by_floor.setdefault(group.floor, set()).add(group.group_id)

    def _leave_floor(self, group: Group) -> None:
        self.num_by_floor[group.floor] -= 1
        if not self.num_by_floor[group.floor]:
            del self.num_by_floor[group.floor]
        if group.is_ready:
            self.num_ready -= 1
            ids = self.ready_by_floor[group.floor]
            ids.discard(group.group_id)
            if not ids:
                del self.ready_by_floor[group.floor]

    # ------------------------------------------------------------ samples that wait for a lease

    def push_pending(self, group: Group, sample: Sample) -> None:
        """The sample waits for a worker; earliest deadline goes first."""
        heapq.heappush(self._pending, (group.floor, group.group_id, sample.index))

    def pop_pending(self) -> tuple[Group, Sample] | None:
        """The waiting sample of the earliest deadline; entries that no longer hold are skipped."""
        while self._pending:
            _, group_id, index = heapq.heappop(self._pending)
            group = self.live.get(group_id)
            if group is not None:
                sample = group.samples[index]
                if sample.lease_id is None and not sample.is_finished:
                    return group, sample
        return None

    @property
    def has_pending(self) -> bool:
        """True where some sample may wait for a lease."""
        return bool(self._pending)

    # ------------------------------------------------------------ wall-clock deadlines

    def start_timer(self, group: Group, now_s: float, timeout_s: float) -> None:
        """The group's first lease went out."""
        group.leased_at_s = now_s
        heapq.heappush(self._timers, (now_s + timeout_s, group.group_id))

    def expired(self, now_s: float) -> list[Group]:
        """Running groups past their wall-clock deadline (each is returned once)."""
        late: list[Group] = []
        # Timers of ended groups go once they are in front, not half an hour later: that many would be megabytes.
        while self._timers and (self._timers[0][0] <= now_s or self._timers[0][1] not in self.live):
            group = self.live.get(heapq.heappop(self._timers)[1])
            if group is not None and not group.is_ready:
                late.append(group)
        return late
