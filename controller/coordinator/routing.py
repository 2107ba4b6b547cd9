"""Which rollout worker takes work: whose credit is answered first, and how much of it is honoured.

Owns: `Router`, the view of all workers while one event is settled. Refuses: what is leased next (leasing.py), taking
leases back (migration.py), whether a group may start (admission.py).

`least_tokens`: the worker that would be done first with what it holds and the new work, both in expected tokens over
measured speed. A group goes to one worker whole, and its later samples follow (affinity) while that leaves the worker
at most `affinity` groups' expected work behind the idlest one. A worker behind another in version gets nothing new; one
pinned to an evaluation is behind on purpose. Credits beyond the slots are honoured in proportion to speed.
`round_robin`: samples are dealt in turn to the workers that have a credit. For comparison.
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
    """Made again for each event; cheap alongside what it decides. `workers`: those that may be leased to at all.

    While it lives leases are only given, so no worker's wait falls and no credit comes back: see `_Queue`.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._is_in_turn = state.settings.routing == "round_robin"
        self.workers = state.workers.usable
        self._usual, self._fastest = state.workers.speeds
        self._newest = state.workers.newest
        self._open = list(state.workers.open)
        self._num_full = 0
        """Workers at the front of `_open` that are known to have no credit left."""
        self._for_groups: _Queue | None = None
        self._for_samples: dict[float, _Queue] = {}
        self._share: float | None = None

    @property
    def is_full(self) -> bool:
        """No worker has a credit left."""
        while self._num_full < len(self._open) and self.free(self._open[self._num_full]) <= 0:
            self._num_full += 1
        return self._num_full == len(self._open)

    # ------------------------------------------------------------ one worker

    def speed(self, worker: Worker) -> float:
        """Tokens per second; of one not measured yet, what the others do."""
        return worker.speed or self._usual

    def wait_s(self, worker: Worker, more_tokens: float = 0.0) -> float:
        """Seconds until the worker is done with what it holds and `more_tokens`, should its speed stay."""
        return (worker.load_tokens + more_tokens) / self.speed(worker)

    def free(self, worker: Worker) -> int:
        """Credits that are honoured: all slots, and of the queue a part by speed, so that all queues last equally."""
        return self._honoured(worker) - len(worker.outstanding)

    def _honoured(self, worker: Worker) -> int:
        speed = worker.speed or self._usual
        if self._is_in_turn or speed >= self._fastest:
            return worker.capacity
        return worker.num_slots + math.ceil((worker.capacity - worker.num_slots) * speed / self._fastest)

    def is_behind(self, worker: Worker) -> bool:
        """Another one samples with a newer version already."""
        return not self._is_in_turn and worker.weights.pin is None and worker.weights.version < self._newest

    # ------------------------------------------------------------ choices

    def for_group(self) -> Worker | None:
        """The worker that starts the next group: with room for all of it, or one that could never hold two."""
        if not may_start_group(self._state.settings, self._state.groups, self._newest_open):
            return None  # then none may: to ask hundreds of workers after every event would be most of all work
        if self._is_in_turn:
            able = [worker for worker in self._open if self._may_start(worker)]
            return self._next(able) if able else None
        if self._for_groups is None:
            group_tokens = self._state.settings.group_size * self._state.routing.lengths.mean
            self._for_groups = _Queue(self._with_room(), self._key(group_tokens))
        return self._for_groups.best(self._may_start)

    @cached_property
    def _newest_open(self) -> int:
        """Version of those with a credit, pinned ones included: a newer one may start whatever an older one may."""
        return max((worker.weights.version for worker in self._open), default=NO_VERSION)

    def _with_room(self) -> list[Worker]:
        """Those not behind that hold less than their share; written out, since it looks at many for each event."""
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
        """Of the samples that run or may start now, those that fall to this worker's credits and speed.

        Workers that still load the version have their share too: the first to load must not take the whole step.
        Counted is what runs and the room left, not all that the bound allows: in the steady state most of that is
        finished and waits for the trainer, and a share of it would let one worker take all that a new version admits.
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
        """The worker that takes a sample whose group has started; None where nobody may now."""
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
        """The worker of this name, where it may take a sample now."""
        worker = self._state.workers.get(name)
        return worker if worker is not None and worker.is_usable and self._can_take(worker, min_version) else None

    def _soonest(self, tokens: float, min_version: int) -> Worker | None:
        """Of those that may take a sample, the one that would be done first with it too."""
        key = self._key(tokens)
        queue = self._for_samples.get(tokens)
        if queue is None:
            fresh = (worker for worker in self._open if not self.is_behind(worker))
            queue = self._for_samples[tokens] = _Queue(fresh, key)
        best = queue.best(lambda worker: self.free(worker) > 0)
        if best is None or best.weights.version >= min_version:
            return best
        able = [worker for worker in self._open if self._can_take(worker, min_version)]  # one pinned to an old version
        return min(able, key=key, default=None)

    def _key(self, more_tokens: float) -> Callable[[Worker], tuple[float, int]]:
        """The order in which workers take so many tokens; written out, since it is asked most."""
        usual, free = self._usual, self.free
        return lambda worker: ((worker.load_tokens + more_tokens) / (worker.speed or usual), -free(worker))

    def _worth_s(self, worker: Worker) -> float:
        """Imbalance in seconds up to which a group stays together."""
        settings = self._state.settings
        return settings.affinity * settings.group_size * self._state.routing.lengths.mean / self.speed(worker)

    def _next(self, able: list[Worker]) -> Worker:
        """The first of `able` after the one served last, in the order they joined."""
        order = {worker.name: place for place, worker in enumerate(self._state.workers.values())}
        chosen = min(able, key=lambda w: (order[w.name] - self._state.routing.last_served - 1) % len(order))
        self._state.routing.last_served = order[chosen.name]
        return chosen


class _Queue:
    """Workers by a key that only rises, the least first; of equal ones the first given."""

    def __init__(self, workers: Iterable[Worker], key: Callable[[Worker], tuple[float, int]]) -> None:
        self._key = key
        self._heap = [(key(worker), place, worker) for place, worker in enumerate(workers)]
        heapify(self._heap)

    def best(self, is_able: Callable[[Worker], bool]) -> Worker | None:
        """The least of those that are able; a worker that is not now will not be later either, and is removed."""
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
