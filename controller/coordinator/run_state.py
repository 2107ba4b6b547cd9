"""Everything the coordinator remembers between two events, and the buffer of effects of the running one.

Owns: `RunState`, `Worker`, `Lease` and the book-keeping of leases (who holds what). Refuses: policy.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from areal_like.trajectory import NO_VERSION
from areal_like.wire.messages import Purpose
from controller.coordinator.effects import Effect, EndStatus, Note, SendBatch, SendCancel
from controller.coordinator.groups import Group, GroupTable
from controller.coordinator.handover import Turn
from controller.coordinator.length_estimator import LengthStatistics
from controller.coordinator.notes import NoteKind
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.snapshot import BatchGroup
from controller.coordinator.worker import Lease, Worker, Workers

if TYPE_CHECKING:
    from controller.coordinator.eval_job import EvalJob

LEASES_PER_LIFE = 1 << 32
"""Lease ids of one process life start at its number times this, so that none is ever given twice."""


class Phase(Enum):
    """RUNNING: work is handed out. FINISHING: the trainer exits, last evaluations run. OVER: EndRun was sent."""

    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


@dataclass(slots=True)
class Rewrite:
    """How often a version was written again."""

    version: int
    lineage: str
    count: int = 0
    """Rewrites asked for."""
    num_unanswered: int = 0
    """Requests without an answer, expired ones included."""
    due_s: float = math.inf
    """When the trainer must have answered; infinite: nothing is under way."""


class RunState:
    """The coordinator's memory."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.phase = Phase.RUNNING
        self.progress = 0
        self._effects: list[Effect] = []
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
        """Empty while the newest version is not available: the trainer that published it is dead."""
        self.rewrite: Rewrite | None = None
        """Of the newest version, where its files were found damaged."""
        self.trained = NO_VERSION
        """What the trainer is at: below `version` while it replays, NO_VERSION until it has spoken."""
        self.shipped = 0
        self.sent = 0
        """Highest step given to the trainer in this life."""
        self.requested: int | None = None
        self.replay_until = 0
        """Steps up to here were recorded in earlier lives."""
        self.recorded: dict[int, tuple[BatchGroup, ...]] = {}
        self.replayed: set[int] = set()
        self.checkpoints: list[int] = []
        # devices that engines and trainer share
        self.turn_of = Turn.SETUP
        self.turn_step = 0
        """Whose batch the last turn of the trainer was prepared for; 0: that trainer is dead."""
        self.held_batch: SendBatch | None = None
        """For the trainer, once no engine has memory."""
        self.num_release_requests = 0
        # groups
        self.table = GroupTable(settings.group_size)
        self.num_drawn = 0
        self.num_consumed = 0
        self.num_filtered = 0
        self.dropped: Counter[str] = Counter()
        self.num_samples_finished = 0
        self.first_failure = ""
        """Why the first answer without a score has none, since a group was last kept."""
        self.consecutive_failures: Counter[str] = Counter()
        """Fates of the groups that ended in a row without one being kept."""
        self.has_kept = False
        self.last_rejection = ""
        # workers
        self.workers = Workers()
        self.leases: dict[int, Lease] = {}
        self.lengths = LengthStatistics(settings.max_new_tokens)
        self.is_roster_news = True
        """Something happened after which workers may have to be notified of a version, or judged."""
        self.roster_due_s = 0.0
        """When one of them is late, or may be tried again."""
        self.turn = -1
        """Place of the worker served last, under round_robin."""
        self.recalls: dict[int, float] = {}
        """Leases asked back and not yet here, with the time until which others wait for them."""
        self.next_migration_s = 0.0
        self._next_lease_id = 0
        # evaluations
        self.eval_jobs: list[EvalJob] = []
        self.evals_done: dict[int, tuple[float | None, ...]] = {}
        """By version; the values are empty where an earlier life found them."""
        # the end
        self.last_step = 0
        self.end_status: EndStatus = "completed"
        self.end_reason = ""
        self.is_trainer_reported = False
        self.is_final_eval_made = False

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        """Add an effect of the running event."""
        self._effects.append(effect)

    def note(self, kind: NoteKind, text: str) -> None:
        """Something for the log."""
        self.emit(Note(kind=kind, text=text))

    def take_effects(self) -> list[Effect]:
        """The effects so far, ledger effects first, each kind in the order it arose."""
        effects, self._effects = self._effects, []
        return [*(one for one in effects if one.is_ledger), *(one for one in effects if not one.is_ledger)]

    # ------------------------------------------------------------ numbers

    @property
    def num_started(self) -> int:
        """Groups running, waiting or consumed (`bounded-admission`)."""
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
        lease = Lease(self._next_lease_id, purpose, group_id, sample_index, worker.name, min_version, num_tokens)
        self.leases[lease.lease_id] = lease
        self.workers.book(worker, lease)
        self.weigh(lease, num_tokens)
        return lease

    def weigh(self, lease: Lease, num_tokens: int) -> None:
        """The answer has so many tokens by now: what its worker still has to do is estimated again."""
        worker = self.workers[lease.worker]
        if lease.lease_id in worker.outstanding:
            expected = self.lengths.expected_left(num_tokens)
            worker.load_tokens += expected - lease.expected_tokens
            lease.expected_tokens = expected

    def release(self, lease: Lease) -> None:
        """The worker's credit is free again; the lease stays known only if it becomes void."""
        self.workers.unbook(self.workers[lease.worker], lease)
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
            self.emit(SendCancel(worker=worker, lease_ids=tuple(sorted(lease_ids))))

    def forget_group(self, group: Group) -> None:
        """The group's fate is sealed: its leases end, it leaves the table."""
        self.cancel([self.leases[lease_id] for lease_id in sorted(group.lease_ids)])
        self.table.remove(group)
