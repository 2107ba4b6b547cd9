"""State of live groups and their samples: counts and versions, indexed by first version.

Fates are decided in group_outcome.py and batch_selection.py.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from areal_like.trajectory import NO_VERSION
from controller.coordinator.sample_outcome import SampleOutcome


@dataclass(slots=True)
class Sample:
    """One sample of a live group: without tokens, partial (num_tokens > 0) or finished."""

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
    """Worker to which it is migrating."""
    moved_from: str = ""
    """Worker that returned it gracefully; for the timeline."""

    def finish(self, outcome: SampleOutcome, value: float | None) -> None:
        """Set the outcome. value: the effective reward; None: the sample is not kept."""
        self.is_finished, self.is_kept, self.value = True, value is not None, value
        self.num_tokens = outcome.num_tokens
        self.first_version, self.last_version = outcome.first_version, outcome.last_version


@dataclass(slots=True)
class Group:
    """The samples of one prompt, from admission until shipped, dropped or filtered."""

    group_id: int
    version: int
    """Loaded version of the worker it was admitted for: none of its tokens is older."""
    samples: list[Sample]
    floor: int
    """Lower bound of the first version: for samples without tokens the admission version counts."""
    is_ready: bool = False
    home: str = ""
    """Worker that has its prompt cached: the group's samples are sent there if the load stays balanced."""
    draw: int = 0
    """Position in the draw order, which determines its row."""
    leased_at_s: float | None = None
    lease_ids: set[int] = field(default_factory=set)
    """All leases of the group in this session, including lost ones."""

    @property
    def num_finished(self) -> int:
        """Number of samples with a verdict."""
        return sum(sample.is_finished for sample in self.samples)

    @property
    def is_complete(self) -> bool:
        """Whether every sample is finished or dropped."""
        return all(sample.is_finished for sample in self.samples)

    @property
    def ceiling(self) -> int | None:
        """Upper bound of the first version: the earliest first token known so far; None if there is none."""
        return min((s.first_version for s in self.samples if s.first_version != NO_VERSION), default=None)

    def min_version(self, sample: Sample) -> int:
        """Minimum version of further tokens of `sample`: that of admission, or of the last token of its prefix
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
        """Add a new group without leased samples."""
        group = Group(group_id, version, [Sample(index) for index in range(self.group_size)], floor=version)
        self.live[group_id] = group
        self.num_by_floor[version] += 1
        return group

    def remove(self, group: Group) -> None:
        """Remove a group that was shipped, dropped or filtered."""
        del self.live[group.group_id]
        self._leave_floor(group)

    def refresh(self, group: Group) -> None:
        """Recompute the floor after a sample's first version became known; in a ready group all are known."""
        assert not group.is_ready
        floor = min(group.version if s.first_version == NO_VERSION else s.first_version for s in group.samples)
        if floor != group.floor:
            self._leave_floor(group)
            group.floor = floor
            self.num_by_floor[floor] += 1

    def mark_ready(self, group: Group) -> None:
        """Mark the group as ready: every sample is finished and it can be used in a batch."""
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
        """Add a sample that waits for a worker; the earliest deadline is first."""
        heapq.heappush(self._pending, (group.floor, group.group_id, sample.index))

    def pop_pending(self) -> tuple[Group, Sample] | None:
        """Remove and return the waiting sample with the earliest deadline; obsolete entries are skipped."""
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
        """Return whether a sample may be waiting for a lease."""
        return bool(self._pending)

    # ------------------------------------------------------------ wall-clock deadlines

    def start_timer(self, group: Group, now_s: float, timeout_s: float) -> None:
        """Start the group's timer, when its first lease is sent."""
        group.leased_at_s = now_s
        heapq.heappush(self._timers, (now_s + timeout_s, group.group_id))

    def expired(self, now_s: float) -> list[Group]:
        """Return running groups past their wall-clock deadline (each once)."""
        late: list[Group] = []
        # Timers of ended groups are removed once they are first, not half an hour later, to save megabytes.
        while self._timers and (self._timers[0][0] <= now_s or self._timers[0][1] not in self.live):
            group = self.live.get(heapq.heappop(self._timers)[1])
            if group is not None and not group.is_ready:
                late.append(group)
        return late
