"""Everything the coordinator remembers between two events, and the buffer of effects of the running one.

Owns: `RunState`, `Worker`, `Lease` and the book-keeping of leases (who holds what). Refuses: policy.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from areal_like.messages import Purpose
from areal_like.trajectory import NO_VERSION
from controller import protocol as p
from controller.groups import Group, GroupTable
from controller.lengths import LengthStatistics
from controller.roster import WATCHED, Workers
from controller.settings import CoordinatorSettings

if TYPE_CHECKING:
    from controller.eval_pins import EvalJob

LEASES_PER_LIFE = 1 << 32
"""Lease ids of one process life start at its number times this, so that none is ever given twice."""


class Phase(Enum):
    """RUNNING: work is handed out. FINISHING: the trainer goes home, last evaluations run. OVER: EndRun was sent."""

    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


class Holder(Enum):
    """Who may use the devices that engines and trainer share (alternation.py)."""

    ENGINES = "engines"
    HANDOVER = "handover"
    TRAINER = "trainer"


@dataclass(slots=True)
class Lease:
    """One attempt at one sample. A void lease belonged to a lost worker; its result is still welcome."""

    lease_id: int
    purpose: Purpose
    group_id: int
    sample_index: int
    worker: str
    min_version: int
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
    is_retold: bool = False
    """The last announcement may have been lost in a silence: say it again."""
    outstanding: set[int] = field(default_factory=set)
    voided: set[int] = field(default_factory=set)
    """Leases it held when it was lost; bounded by its capacity."""
    is_present: bool = False
    is_gone: bool = False
    is_draining: bool = False
    """It leaves in good order, or has left."""
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
    """It was told to swap in what it has staged."""
    pin: EvalJob | None = None
    has_memory: bool = False
    """A version was announced to this process, and it has not released its memory since."""
    release_due_s: float | None = None
    """When it must have released its memory; None: it was not asked to."""
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


class RunState:
    """The coordinator's memory."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.phase = Phase.RUNNING
        self.progress = 0
        self._effects: list[p.Effect] = []
        # the trainer
        self.lineage = ""
        self.lineages: set[str] = set()
        """Of this life of the run: one more than its trainer was started again."""
        self.num_lineages = 0
        """Recorded before this life."""
        self.base = 0
        """Version the trainer started this life of its own from."""
        self.version = NO_VERSION
        """Newest published, by whatever life of the trainer."""
        self.version_lineage = ""
        self.manifest_path = ""
        """Empty while the newest version is not to be had: the trainer that published it is dead."""
        self.trained = NO_VERSION
        """What the trainer is at: below `version` while it replays, NO_VERSION until it has spoken."""
        self.shipped = 0
        self.sent = 0
        """Highest step given to the trainer in this life."""
        self.requested: int | None = None
        self.replay_until = 0
        """Steps up to here were recorded in earlier lives."""
        self.recorded: dict[int, tuple[p.BatchGroup, ...]] = {}
        self.replayed: set[int] = set()
        self.checkpoints: list[int] = []
        # devices that engines and trainer share
        self.holder = Holder.ENGINES
        self.held_batch: p.SendBatch | None = None
        """For the trainer, once no engine has memory."""
        # groups
        self.table = GroupTable(settings.group_size)
        self.num_drawn = 0
        self.num_consumed = 0
        self.num_filtered = 0
        self.dropped: Counter[str] = Counter()
        self.num_samples_finished = 0
        self.first_failure = ""
        """Why the first answer without a score has none, since a group was last kept."""
        self.barren: Counter[str] = Counter()
        """Fates of the groups that ended in a row without one being kept."""
        self.has_kept = False
        self.last_rejection = ""
        # workers
        self.workers = Workers()
        self.leases: dict[int, Lease] = {}
        self.lengths = LengthStatistics(settings.max_new_tokens)
        self.is_roster_news = True
        """Something happened after which workers may have to be told of a version, or judged."""
        self.roster_due_s = 0.0
        """When one of them is late, or may be tried again."""
        self.turn = -1
        """Place of the worker served last, under round_robin."""
        self.recalls: dict[int, float] = {}
        """Leases asked back and not yet here, with the time until which others wait for them."""
        self.next_migration_s = 0.0
        self.num_migrated = 0
        self._next_lease_id = 0
        # evaluations
        self.eval_jobs: list[EvalJob] = []
        self.evals_done: dict[int, tuple[float | None, ...]] = {}
        """By version; the values are empty where an earlier life found them."""
        # the end
        self.last_step = 0
        self.end_status: p.EndStatus = "completed"
        self.end_reason = ""
        self.is_trainer_told = False
        self.is_final_eval_made = False

    # ------------------------------------------------------------ effects

    def emit(self, effect: p.Effect) -> None:
        """Add an effect of the running event."""
        self._effects.append(effect)

    def note(self, kind: str, text: str) -> None:
        """Something for the log."""
        self.emit(p.Note(kind=kind, text=text))

    def take_effects(self) -> list[p.Effect]:
        """The effects so far, ledger effects first, each kind in the order it arose."""
        effects, self._effects = self._effects, []
        return [*(one for one in effects if one.is_ledger), *(one for one in effects if not one.is_ledger)]

    # ------------------------------------------------------------ numbers

    @property
    def num_started(self) -> int:
        """Groups running, waiting or consumed (law 1)."""
        return self.num_consumed + len(self.table.live)

    @property
    def next_step(self) -> int:
        """The step whose batch is formed next."""
        return self.shipped + 1

    @property
    def is_trainer_busy(self) -> bool:
        """A version is still to come from batches the trainer has."""
        return self.trained < max(self.sent, self.base)

    # ------------------------------------------------------------ leases

    def start_lease_ids(self) -> None:
        """A new life: ids that no earlier life used."""
        self._next_lease_id = self.num_lineages * LEASES_PER_LIFE

    def new_lease(
        self,
        worker: Worker,
        purpose: Purpose,
        group_id: int,
        sample_index: int,
        min_version: int,
        num_tokens: int = 0,
    ) -> Lease:
        """Book a lease on a worker's credits. num_tokens: known of the answer already."""
        assert worker.free > 0
        self._next_lease_id += 1
        lease = Lease(self._next_lease_id, purpose, group_id, sample_index, worker.name, min_version)
        self.leases[lease.lease_id] = lease
        worker.outstanding.add(lease.lease_id)
        self.workers.credited(worker)
        self.weigh(lease, num_tokens)
        return lease

    def weigh(self, lease: Lease, num_tokens: int) -> None:
        """The answer has so many tokens by now: what its worker still has to do is estimated anew."""
        worker = self.workers[lease.worker]
        if lease.lease_id in worker.outstanding:
            expected = self.lengths.expected_left(num_tokens)
            worker.load_tokens += expected - lease.expected_tokens
            lease.expected_tokens = expected

    def release(self, lease: Lease) -> None:
        """The worker's credit is free again; the lease stays known only if it becomes void."""
        self.workers[lease.worker].let_go(lease)
        self.leases.pop(lease.lease_id, None)
        self.recalls.pop(lease.lease_id, None)
        if lease.purpose == "train" and (group := self.table.live.get(lease.group_id)) is not None:
            group.lease_ids.discard(lease.lease_id)
            sample = group.samples[lease.sample_index]
            if sample.lease_id == lease.lease_id:
                sample.lease_id = None

    def cancel(self, leases: list[Lease]) -> None:
        """Release these leases and tell their workers to stop."""
        by_worker: dict[str, list[int]] = {}
        for lease in leases:
            if not lease.is_void:
                by_worker.setdefault(lease.worker, []).append(lease.lease_id)
            self.release(lease)
        for worker, lease_ids in by_worker.items():
            self.emit(p.SendCancel(worker=worker, lease_ids=tuple(sorted(lease_ids))))

    def forget_group(self, group: Group) -> None:
        """The group's fate is sealed: its leases end, it leaves the table."""
        self.cancel([self.leases[lease_id] for lease_id in sorted(group.lease_ids)])
        self.table.remove(group)
