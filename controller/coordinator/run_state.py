"""Everything the coordinator remembers between two events, and the buffer of effects of the running one.

Owns: `RunState`, its phase, and the book-keeping of leases (who holds what). Refuses: policy; the fields of its parts
(run_parts.py).
"""

from __future__ import annotations

from enum import Enum

from areal_like.wire.messages import Purpose
from controller.coordinator.draws import InOrder
from controller.coordinator.effects import Effect, Note, SendCancel
from controller.coordinator.groups import Group, GroupTable
from controller.coordinator.length_estimator import LengthStatistics
from controller.coordinator.notes import NoteKind
from controller.coordinator.run_parts import (
    DeviceState,
    EndingState,
    EvaluationState,
    GroupState,
    RoutingState,
    TrainerState,
    VersionCheck,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Lease, Worker, Workers

LEASES_PER_LIFE = 1 << 32
"""Lease ids of one process life start at its number times this, so that none is ever given twice."""


class Phase(Enum):
    """RUNNING: work is handed out. FINISHING: the trainer exits, last evaluations run. OVER: EndRun was sent."""

    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


class RunState:
    """The coordinator's memory, in named parts."""

    __slots__ = (
        "_effects", "_next_lease_id", "devices", "ending", "evaluations", "groups", "leases", "now_s", "phase",
        "progress", "routing", "settings", "trainer", "version_check", "workers",
    )  # fmt: skip

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.phase = Phase.RUNNING
        self.progress = 0
        self._effects: list[Effect] = []
        self.trainer = TrainerState()
        self.devices = DeviceState()
        self.groups = GroupState(GroupTable(settings.group_size), InOrder(settings.max_draws))
        self.workers = Workers()
        self.leases: dict[int, Lease] = {}
        self._next_lease_id = 0
        self.routing = RoutingState(LengthStatistics(settings.max_new_tokens))
        self.version_check = VersionCheck()
        self.evaluations = EvaluationState()
        self.ending = EndingState()

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        """Add an effect of the running event."""
        self._effects.append(effect)

    def note(self, kind: NoteKind, text: str) -> None:
        """Something for the log."""
        self.emit(Note(kind=kind, text=text))

    def take_effects(self) -> list[Effect]:
        """The effects so far, ledger effects first, each kind in the order it arose."""
        # The shell commits the first before it sends the second (effects.py): nobody hears of what a crash could undo.
        effects, self._effects = self._effects, []
        return [*(one for one in effects if one.is_ledger), *(one for one in effects if not one.is_ledger)]

    # ------------------------------------------------------------ leases

    def start_lease_ids(self) -> None:
        """A new life: ids that no earlier life used."""
        self._next_lease_id = self.trainer.num_lineages * LEASES_PER_LIFE

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
            expected = self.routing.lengths.expected_left(num_tokens)
            worker.load_tokens += expected - lease.expected_tokens
            lease.expected_tokens = expected

    def release(self, lease: Lease) -> None:
        """The worker's credit is free again; the lease stays known only if it becomes void."""
        self.workers.unbook(self.workers[lease.worker], lease)
        self.leases.pop(lease.lease_id, None)
        self.routing.recalls.pop(lease.lease_id, None)
        if lease.purpose == "train" and (group := self.groups.table.live.get(lease.group_id)) is not None:
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
        self.groups.table.remove(group)
