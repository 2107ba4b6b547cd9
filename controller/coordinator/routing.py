"""Chooses the rollout worker that receives work: the order of workers, and how many of a worker's credits are used.

`Router` is the view of all workers while one event is settled. What is leased next is decided in leasing.py, recalls in
migration.py, the start of groups in admission.py.

`least_tokens`: the worker that would finish first with its present and the new work, both in expected tokens over
measured speed. A group is sent to one worker completely, and its later samples follow (affinity) while that leaves the
worker at most `affinity` groups' expected work behind the least loaded one. A worker with an older version than another
gets no new work; one pinned to an evaluation has an older version on purpose. Credits beyond the slots are used in
proportion to speed.
`round_robin`: samples are assigned in turn to the workers that have a credit. For comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from heapq import heapify, heappop, heapreplace

from areal_like.trajectory import NO_VERSION
from controller.coordinator.admission import may_start_group
from controller.coordinator.groups import Group, Sample
from controller.coordinator.run_state import RunState
from controller.coordinator.worker import Worker


class Router:
    """Created for each event, at a cost that is small compared with the leases. `workers`: the workers that may get
    leases.

    During its lifetime leases are only added, so no worker's wait decreases and no credit is returned: see `_Queue`.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._is_in_turn = state.settings.routing == "round_robin"
        self.workers = state.workers.usable
        self._usual, self._fastest = state.workers.speeds
        self._newest = state.workers.newest
        self._open = list(state.workers.open)
        self._num_full = 0
        """Number of workers at the front of `_open` that are known to have no credit left."""
        self._for_groups: _Queue | None = None
        self._for_samples: dict[float, _Queue] = {}
        self._share: float | None = None

    @property
    def is_full(self) -> bool:
        """Return whether no worker has a credit left."""
        while self._num_full < len(self._open) and self.free(self._open[self._num_full]) <= 0:
            self._num_full += 1
        return self._num_full == len(self._open)

    # ------------------------------------------------------------ one worker

    def speed(self, worker: Worker) -> float:
        """Tokens per second; for a worker not measured yet the mean of the others."""
        return worker.speed or self._usual

    def wait_s(self, worker: Worker, more_tokens: float = 0.0) -> float:
        """Seconds until the worker is done with its work and `more_tokens`, at its present speed."""
        return (worker.load_tokens + more_tokens) / self.speed(worker)

    def free(self, worker: Worker) -> int:
        """Credits that are used: all slots, and a part of the queue in proportion to speed, so that all queues last
        equally long.
        """
        return self._honoured(worker) - len(worker.outstanding)

    def _honoured(self, worker: Worker) -> int:
        speed = worker.speed or self._usual
        if self._is_in_turn or speed >= self._fastest:
            return worker.capacity
        return worker.num_slots + math.ceil((worker.capacity - worker.num_slots) * speed / self._fastest)

    def is_behind(self, worker: Worker) -> bool:
        """Return whether another worker already samples with a newer version."""
        return not self._is_in_turn and worker.weights.pin is None and worker.weights.version < self._newest

    # ------------------------------------------------------------ choices

    def for_group(self) -> Worker | None:
        """The worker that starts the next group: it has room for the whole group, or a capacity below two groups."""
        if not may_start_group(self._state.settings, self._state.groups, self._newest_open):
            return None  # then no worker may; checking hundreds of workers after every event would dominate the cost
        if self._is_in_turn:
            able = [worker for worker in self._open if self._may_start(worker)]
            return self._next(able) if able else None
        if self._for_groups is None:
            group_tokens = self._state.settings.group_size * self._state.routing.lengths.mean
            self._for_groups = _Queue(self._with_room(), self._key(group_tokens))
        return self._for_groups.best(self._may_start)

    @cached_property
    def _newest_open(self) -> int:
        """Newest version of the workers with a credit, including pinned ones: a newer version may start every group
        that an older one may.
        """
        return max((worker.weights.version for worker in self._open), default=NO_VERSION)

    def _with_room(self) -> list[Worker]:
        """Workers with the newest version and less than their share. Inlined for speed, because it checks many workers
        for each event.
        """
        newest, usual, share = self._newest, self._usual, self._share_of_one()
        return [
            worker
            for worker in self._open
            if (worker.weights.version >= newest or worker.weights.pin is not None)
            and (not worker.outstanding or len(worker.outstanding) < share * worker.capacity * (worker.speed or usual))
        ]

    def _may_start(self, worker: Worker) -> bool:
        size, free = self._state.settings.group_size, self.free(worker)
        is_roomy = free >= size or (free > 0 and (self._is_in_turn or self._honoured(worker) < 2 * size))
        return (
            is_roomy
            and self._is_within_share(worker)
            and not self.is_behind(worker)
            and may_start_group(self._state.settings, self._state.groups, worker.weights.version)
        )

    def _is_within_share(self, worker: Worker) -> bool:
        return not worker.outstanding or len(worker.outstanding) < self._fair_share(worker)

    def _fair_share(self, worker: Worker) -> float:
        """The worker's share, by credits and speed, of the samples that run or may start now.

        Workers that are still loading the version have a share too, so that the first to load does not get the whole
        step. Running samples and free credits are counted, not all samples that the bound allows: in the steady state
        most of those are finished and wait for the trainer, and a share of them would let one worker get all groups
        that a new version admits.
        """
        return self._share_of_one() * worker.capacity * self._weight(worker)

    def _share_of_one(self) -> float:
        """The share of a worker with one credit and speed 1."""
        state, settings = self._state, self._state.settings
        if settings.bound is None:
            return math.inf
        if self._share is None:
            weight = state.workers.capacity if self._is_in_turn else state.workers.speed_capacity
            room = (state.trainer.version + settings.bound + 1) * settings.groups_per_step - state.groups.num_started
            samples = (state.groups.table.num_running + max(0, room)) * settings.group_size
            self._share = samples / weight if weight else math.inf
        return self._share

    def _weight(self, worker: Worker) -> float:
        return 1.0 if self._is_in_turn else self.speed(worker)

    def for_sample(self, group: Group, sample: Sample) -> Worker | None:
        """The worker for a sample whose group has started; None if no worker may get it now."""
        min_version = group.min_version(sample)
        if wanted := self._if_able(sample.moving_to, min_version):
            return wanted
        if self._is_in_turn:
            able = [worker for worker in self._open if self._can_take(worker, min_version)]
            return self._next([worker for worker in able if self._is_within_share(worker)] or able) if able else None
        tokens = self._state.routing.lengths.expected_left(sample.num_tokens)
        best = self._soonest(tokens, min_version)
        if best is None:
            return None
        home = self._if_able(group.home, min_version)
        if home is not None and self.wait_s(home, tokens) - self.wait_s(best, tokens) <= self._worth_s(best):
            return home
        return best

    def _can_take(self, worker: Worker, min_version: int) -> bool:
        return worker.weights.version >= min_version and self.free(worker) > 0 and not self.is_behind(worker)

    def _if_able(self, name: str, min_version: int) -> Worker | None:
        """The worker of this name, if it may get a sample now."""
        worker = self._state.workers.get(name)
        return worker if worker is not None and worker.is_usable and self._can_take(worker, min_version) else None

    def _soonest(self, tokens: float, min_version: int) -> Worker | None:
        """The worker that would finish first with the sample, of all that may get it."""
        key = self._key(tokens)
        queue = self._for_samples.get(tokens)
        if queue is None:
            fresh = (worker for worker in self._open if not self.is_behind(worker))
            queue = self._for_samples[tokens] = _Queue(fresh, key)
        best = queue.best(lambda worker: self.free(worker) > 0)
        if best is None or best.weights.version >= min_version:
            return best
        able = [worker for worker in self._open if self._can_take(worker, min_version)]  # pinned to an old version
        return min(able, key=key, default=None)

    def _key(self, more_tokens: float) -> Callable[[Worker], tuple[float, int]]:
        """Sort key of workers for the given number of tokens. Inlined for speed, because it is called most often."""
        usual, free = self._usual, self.free
        return lambda worker: ((worker.load_tokens + more_tokens) / (worker.speed or usual), -free(worker))

    def _worth_s(self, worker: Worker) -> float:
        """Imbalance in seconds up to which a group stays on one worker."""
        settings = self._state.settings
        return settings.affinity * settings.group_size * self._state.routing.lengths.mean / self.speed(worker)

    def _next(self, able: list[Worker]) -> Worker:
        """The first of `able` after the last served worker, in the order in which they joined."""
        order = {worker.name: place for place, worker in enumerate(self._state.workers.values())}
        chosen = min(able, key=lambda w: (order[w.name] - self._state.routing.last_served - 1) % len(order))
        self._state.routing.last_served = order[chosen.name]
        return chosen


class _Queue:
    """Priority queue of workers by a key that never decreases; of equal keys the first added is returned."""

    def __init__(self, workers: Iterable[Worker], key: Callable[[Worker], tuple[float, int]]) -> None:
        self._key = key
        self._heap = [(key(worker), place, worker) for place, worker in enumerate(workers)]
        heapify(self._heap)

    def best(self, is_able: Callable[[Worker], bool]) -> Worker | None:
        """The worker with the smallest key that is able. A worker that is not able now will not be later either, and is
        removed.
        """
        heap = self._heap
        while heap:
            key, place, worker = heap[0]
            if (now := self._key(worker)) != key:
                heapreplace(heap, (now, place, worker))
            elif is_able(worker):
                return worker
            else:
                heappop(heap)
        return None
