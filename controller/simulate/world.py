"""Simulates a job under a virtual clock: simulated workers and trainer around the real coordinator.

Manages the queue of events and applies the coordinator's effects to the machines. Durations and lengths are in
areal_like/emulation, measurements in record.py, sweeps in plan.py.

The trainer requests one batch ahead, like the real one. Rewards take `reward_s` each, in parallel. Messages take no
time. A lease is one sample, or in large jobs one group (docs/decisions/0025-simulator.md). Workers that are notified of
a version at the same time load it at the same time, and the coordinator is notified immediately.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from typing import Any

import numpy as np

from areal_like.emulation.replica import MAX_STRIDE_TOKENS, Replica, Sequence
from areal_like.emulation.roofline import Costs
from controller.coordinator.coordinator import Coordinator
from controller.coordinator.effects import (
    DropGroup,
    EndRun,
    SendBatch,
    SendLeases,
    SendNoMoreBatches,
    SendRecall,
    SendVersion,
)
from controller.coordinator.events import (
    BatchRequested,
    CheckpointTaken,
    Event,
    Published,
    RunStarted,
    SampleReported,
    WorkerJoined,
    WorkerVersionLoaded,
)
from controller.coordinator.sample_outcome import SampleOutcome
from controller.coordinator.settings import CoordinatorSettings
from controller.simulate.job import Job, Outcome
from controller.simulate.record import Record
from controller.simulate.reporter import Lease, Reporter

GRID_PARTS = 8
"""If a lease is a group, answers end on multiples of this part of their mean length, so that several end at once."""
GROUP_STRIDE_TOKENS = 4096.0
"""In that case the rate is recomputed after at most this many tokens."""
DRAWN_GROUPS = 256
"""Number of groups whose lengths are drawn at once."""
MOST_TOKENS = 32_768
"""Maximum length if lengths are unlimited, used by the coordinator for its first estimates."""
NEVER_S = 1e18
"""Deadlines that simulated machines cannot miss."""


class World:
    """One simulation. Call `run` once."""

    def __init__(self, job: Job, costs: Costs, num_workers: int, *, held: int | Ordered[int] | None = None) -> None:
        """held: maximum samples of each worker, including waiting ones; None: twice the number it decodes at once."""
        self.job, self.costs = job, costs
        self._is_by_group = job.is_by_group
        per_lease = job.group_size if self._is_by_group else 1
        self._group_size = job.group_size // per_lease
        self._at_once = min(per_lease, costs.slots)
        """Number of answers of a lease."""
        mean = job.mean_length
        samples = held or 2 * costs.max_sequences(job.prompt_tokens + mean)
        each = [samples] * num_workers if isinstance(samples, int) else samples
        self._capacities = [max(1, count // per_lease) for count in each]
        self._grid = grid = max(1, round(mean / GRID_PARTS)) if self._is_by_group else 0
        stride = GROUP_STRIDE_TOKENS if self._is_by_group else MAX_STRIDE_TOKENS
        cache = costs.cache_tokens
        self._replicas = [
            Replica(f"rollout-{i}", costs, costs.slots, grid_tokens=grid, cache_tokens=cache, stride_tokens=stride)
            for i in range(num_workers)
        ]
        self._index = {replica.name: i for i, replica in enumerate(self._replicas)}
        self._announced = [-1] * num_workers
        self._staging = [False] * num_workers
        self._leases: dict[int, Lease] = {}
        self._lengths: dict[int, tuple[list[int], list[int]]] = {}
        """Lengths by group; see `_draw`."""
        self._is_moving = job.migration and not job.is_by_group and num_workers > 1
        self._reporter = Reporter()
        self._drawn: deque[tuple[list[int], list[int]]] = deque()
        self._rng = np.random.default_rng(job.seed)
        self._coordinator = Coordinator(
            CoordinatorSettings(
                groups_per_step=job.groups_per_step, group_size=self._group_size, num_steps=job.num_steps,
                replay=job.replay, mode=job.mode, max_staleness=job.max_staleness, on_stale=job.on_stale,
                group_timeout_s=NEVER_S, load_deadline_s=NEVER_S, num_workers=num_workers, routing=job.routing,
                affinity=job.affinity, migration=self._is_moving, min_gain_s=job.min_gain_s,
                max_new_tokens=min(job.lengths.cap, MOST_TOKENS),
            )
        )  # fmt: skip
        self._now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._carried_out: dict[type, Callable[[Any], None]] = {
            SendLeases: self._take_leases,
            SendRecall: lambda effect: self._at(self._now_s, self._hand_back, effect),
            SendBatch: self._take_batch,
            DropGroup: self._lose,
            SendNoMoreBatches: lambda effect: self._at(self._now_s, self._save),
            EndRun: self._end,
        }
        """Handlers of the coordinator's effects; for SendVersion see `_handle`. Other effects concern files and
        sockets.
        """
        self._serial = 0
        self._wake_at = [math.inf] * num_workers
        self._batches: dict[int, SendBatch] = {}
        self._trained = 0
        self._asked = 0
        self._is_training = False
        self._free_since_s = 0.0
        self._record = Record(job)
        self._is_over = False

    # ------------------------------------------------------------ the clock

    def run(self) -> Outcome:
        """Run the simulation to its end."""
        self._handle(RunStarted(lineage="l0"))
        joining = zip(self._replicas, self._capacities, strict=True)
        self._handle(*(WorkerJoined(worker=r.name, incarnation="0", capacity=held) for r, held in joining))
        self._handle(Published(version=0, lineage="l0", manifest_path="v0"))
        self._ask()
        if self._is_moving:
            self._at(self.job.heartbeat_s, self._report)
        with _uncollected():
            self._run()
        assert self._is_over, "the simulated job makes no progress"
        return self._record.outcome(len(self._replicas))

    def _run(self) -> None:
        queue = self._queue
        while queue and not self._is_over:
            self._now_s, _, action, arguments = heapq.heappop(queue)
            action(*arguments)

    def _at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._queue, (time_s, self._serial, action, arguments))

    # ------------------------------------------------------------ the coordinator

    def _handle(self, *events: Event) -> None:
        reported: dict[int, list[int]] = {}
        for effect in self._coordinator.handle_together(events, self._now_s):
            kind = type(effect)
            if (carry_out := self._carried_out.get(kind)) is not None:
                carry_out(effect)
            elif kind is SendVersion:
                assert isinstance(effect, SendVersion)
                reported.setdefault(effect.version, []).append(self._index[effect.worker])
        for version, workers in reported.items():
            self._announce(workers, version)

    def _take_batch(self, batch: SendBatch) -> None:
        self._batches[batch.step] = batch
        self._at(self._now_s, self._train)

    def _lose(self, effect: DropGroup) -> None:
        """Record the lengths of a dropped group; its answers that are still running end as usual."""
        if (drawn := self._lengths.get(effect.group_id)) is not None:
            self._record.lost(drawn[0])

    def _end(self, effect: EndRun) -> None:
        self._is_over = True

    def _save(self) -> None:
        if not self._is_training:
            self._handle(CheckpointTaken(version=self._trained, path="c"))

    # ------------------------------------------------------------ rollout

    def _take_leases(self, effect: SendLeases) -> None:
        worker = self._index[effect.worker]
        replica = self._replicas[worker]
        self._catch_up(worker)
        for order in effect.leases:
            drawn = self._lengths.get(order.group_id)
            if drawn is None:
                drawn = self._lengths[order.group_id] = self._draw()
            if self._is_by_group:
                shares = [Counter(drawn[1][i : i + self._at_once]) for i in range(0, len(drawn[1]), self._at_once)]
            else:
                shares = [Counter((drawn[0][order.sample_index],))]
            lease = Lease(order.group_id, order.sample_index, worker, len(shares))
            self._leases[order.lease_id] = lease
            for share in shares:
                lengths, numbers = tuple(share), tuple(share.values())
                sequence = Sequence(order.lease_id, self.job.prompt_tokens, lengths, numbers, order.prefix_tokens)
                replica.add(sequence)
            if self._is_moving:
                self._reporter.began(order.lease_id, lease, sequence)
        self._refill(worker)

    def _draw(self) -> tuple[list[int], list[int]]:
        """Answer lengths of the next group; if a lease is a group, also sorted and rounded to the grid."""
        if not self._drawn:
            lengths = self.job.lengths.draw_groups(self._rng, self.job.group_size, DRAWN_GROUPS)
            cells = np.maximum(1, np.rint(np.asarray(lengths) / (self._grid or 1))).astype(np.int64)
            self._drawn.extend(zip(lengths, (np.sort(cells, axis=1) * self._grid).tolist(), strict=True))
        return self._drawn.popleft()

    def _catch_up(self, worker: int) -> None:
        """Advance the worker to the current time, and report finished answers."""
        replica = self._replicas[worker]
        replica.advance(self._now_s)
        if ended := self._ended(replica):
            self._at(self._now_s, self._report_ended, ended)

    def _ended(self, replica: Replica) -> list[int]:
        """Leases whose answers have all ended."""
        found: list[int] = []
        for sequence in replica.take_ended():
            lease = self._leases[sequence.lease_id]
            lease.left -= 1
            if lease.left == 0:
                found.append(sequence.lease_id)
        return found

    def _report_ended(self, lease_ids: list[int]) -> None:
        """Report answers when they have their rewards."""
        if self.job.reward_s:
            self._at(self._now_s + self.job.reward_s, self._finish, lease_ids)
        else:
            self._finish(lease_ids)

    def _report(self) -> None:
        """Make a heartbeat of every worker: its answers so far, and its speed."""
        events: list[Event] = []
        for worker, replica in enumerate(self._replicas):
            self._catch_up(worker)
            self._refill(worker)
            events += self._reporter.heartbeat(replica, self._leases)
        self._handle(*events)
        if self._queue and not self._is_over:
            self._at(self._now_s + self.job.heartbeat_s, self._report)

    def _hand_back(self, recall: SendRecall) -> None:
        """Return the worker's remaining leases of these with their tokens; they are immediately leased to another
        worker.
        """
        worker = self._index[recall.worker]
        self._catch_up(worker)
        events = self._reporter.returned(self._replicas[worker], recall.lease_ids, self._leases)
        self._refill(worker)
        self._handle(*events)

    def _finish(self, lease_ids: list[int]) -> None:
        self._handle(*map(self._finished, lease_ids))

    def _finished(self, lease_id: int) -> SampleReported:
        lease = self._leases.pop(lease_id)
        self._reporter.ended(lease_id)
        replica = self._replicas[lease.worker]
        lengths = self._lengths[lease.group_id][0]
        outcome = SampleOutcome(
            lease_id=lease_id, group_id=lease.group_id, sample_index=lease.index,
            num_tokens=sum(lengths) if self._is_by_group else lengths[lease.index],
            first_version=lease.first_version, last_version=replica.version, verdict_kind="scored",
            value=float(lease_id % 2),
        )  # fmt: skip
        return SampleReported(worker=replica.name, outcome=outcome)

    def _refill(self, worker: int) -> None:
        replica = self._replicas[worker]
        for sequence in replica.refill():
            lease = self._leases[sequence.lease_id]
            if lease.first_version < 0:
                lease.first_version = replica.version
        wake_s = replica.wake_s
        if wake_s < math.inf and wake_s != self._wake_at[worker]:
            self._wake_at[worker] = wake_s
            self._at(wake_s, self._wake, worker, wake_s)

    def _wake(self, worker: int, time_s: float) -> None:
        if self._wake_at[worker] != time_s:
            return  # outdated: its time was recomputed
        self._wake_at[worker] = math.inf
        replica = self._replicas[worker]
        replica.advance(self._now_s)
        ended = self._ended(replica)
        self._refill(worker)
        if ended:
            self._report_ended(ended)
        if not self._replicas[worker].is_admitting:
            self._drained((worker,))

    # ------------------------------------------------------------ versions

    def _announce(self, workers: Iterable[int], version: int) -> None:
        first, later = [], []
        for worker in workers:
            self._announced[worker] = version
            if self._replicas[worker].version < 0:
                self._replicas[worker].version = version
                first.append(worker)
            elif not self._staging[worker]:
                self._staging[worker] = True
                later.append(worker)
        if first:
            self._at(self._now_s, self._loaded, first, version)
        if later:
            self._at(self._now_s + self.costs.stage_s(), self._staged, later)

    def _staged(self, workers: list[int]) -> None:
        if self.job.interruption != "drain":
            self._swap(workers)
            return
        for worker in workers:
            self._replicas[worker].is_admitting = False
            self._catch_up(worker)
        self._drained(workers)

    def _drained(self, workers: Iterable[int]) -> None:
        """Swap the new version in on workers that have no running answers."""
        ready = [w for w in workers if not self._replicas[w].is_admitting and not self._replicas[w].num_active]
        for worker in ready:
            self._replicas[worker].is_admitting = True
        if ready:
            self._swap(ready)

    def _swap(self, workers: Iterable[int]) -> None:
        pause_s, is_recomputing = self.costs.swap_s(), self.job.interruption == "recompute"
        by_version: dict[int, list[int]] = {}
        for worker in workers:
            self._catch_up(worker)
            self._replicas[worker].swap(pause_s, is_recomputing=is_recomputing)
            self._refill(worker)
            by_version.setdefault(self._announced[worker], []).append(worker)
        for version, members in by_version.items():
            self._at(self._now_s + pause_s, self._swapped, members, version)

    def _swapped(self, workers: list[int], version: int) -> None:
        for worker in workers:
            self._replicas[worker].version = version
            self._staging[worker] = False
        self._loaded(workers, version)
        late: dict[int, list[int]] = {}
        for worker in workers:
            if self._announced[worker] > version and not self._staging[worker]:
                late.setdefault(self._announced[worker], []).append(worker)
        for newest, members in late.items():
            self._announce(members, newest)

    def _loaded(self, workers: Iterable[int], version: int) -> None:
        names = (self._replicas[worker].name for worker in workers)
        self._handle(*(WorkerVersionLoaded(worker=name, version=version, lineage="l0") for name in names))

    # ------------------------------------------------------------ trainer

    def _ask(self) -> None:
        if self._asked < min(self._trained + 2, self.job.num_steps) and self._asked not in self._batches_missing():
            self._asked += 1
            self._handle(BatchRequested(step=self._asked))

    def _batches_missing(self) -> tuple[int, ...]:
        """The requested step without an answer, if any."""
        answered = self._asked <= self._trained + self._is_training or self._asked in self._batches
        return () if answered or not self._asked else (self._asked,)

    def _train(self) -> None:
        step = self._trained + 1
        if self._is_training or step not in self._batches:
            return
        batch = self._batches.pop(step)
        lengths: list[int] = []
        staleness: Counter[int] = Counter()
        for group in batch.groups:
            lengths += self._lengths.pop(group.group_id)[0]
            staleness[step - 1 - group.first_version] += 1
        full = [self.job.prompt_tokens + length for length in lengths]
        # Reused groups are about as long as new ones.
        full += (full * -(-len(batch.reused) // max(1, len(batch.groups))))[: len(batch.reused) * self.job.group_size]
        imbalance = self._record.imbalance(full, self.costs.trainer_ranks)
        seconds = self.costs.train_s(full * self.job.passes_per_batch, imbalance, self.job.updates_per_step)
        self._record.batch(lengths, staleness, wait_s=self._now_s - self._free_since_s, train_s=seconds)
        self._is_training = True
        self._at(self._now_s + seconds, self._publish, step)
        self._ask()

    def _publish(self, step: int) -> None:
        self._is_training = False
        self._trained = step
        self._free_since_s = self._now_s
        self._record.step_ended(self._now_s)
        if self._record.wants_workers:
            for worker in range(len(self._replicas)):
                self._catch_up(worker)
                self._refill(worker)
            self._record.workers(self._replicas)
        self._handle(Published(version=step, lineage="l0", manifest_path=f"v{step}"))
        if step == self.job.num_steps:
            self._at(self._now_s, self._save)
        self._ask()
        self._train()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection: events leave no reference cycles, and the collection takes time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
