"""The coordinator's state between two events, with the buffer of effects of the current event.

`RunState` also keeps the records of leases. The fields of its parts are in run_parts.py.
"""

from __future__ import annotations

from enum import Enum

from areal_like.wire.messages import Purpose
from controller.coordinator.draws import InOrder
from controller.coordinator.effects import Effect, Note, SendCancel
from controller.coordinator.groups import Group, GroupTable
from controller.coordinator.length_estimator import LengthStatistics
from controller.coordinator.notes import NoteKind
from controller.coordinator.replay_buffer import ReplayBuffer
from controller.coordinator.run_parts import (
    DeviceState,
    EndingState,
    EvaluationState,
    GroupState,
    RoutingState,
    ScalingState,
    TrainerState,
    VersionCheck,
)
from controller.coordinator.settings import CoordinatorSettings
from controller.coordinator.worker import Lease, Worker, Workers

LEASES_PER_LIFE = 1 << 32
"""Lease ids of a session start at its number times this, so that no id is used twice."""


class Phase(Enum):
    """RUNNING: leases are made. FINISHING: the trainer exits, last evaluations run. OVER: EndRun was sent."""

    RUNNING = "running"
    FINISHING = "finishing"
    OVER = "over"


class RunState:
    """The coordinator's state, in named parts."""

    __slots__ = (
        "_effects", "_next_lease_id", "devices", "ending", "evaluations", "groups", "leases", "now_s", "phase",
        "progress", "routing", "scaling", "settings", "trainer", "version_check", "workers",
    )  # fmt: skip

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.now_s = 0.0
        self.phase = Phase.RUNNING
        self.progress = 0
        self._effects: list[Effect] = []
        self.trainer = TrainerState()
        self.devices = DeviceState()
        self.groups = GroupState(
            GroupTable(settings.group_size), InOrder(settings.max_draws), ReplayBuffer(settings.replay)
        )
        self.workers = Workers()
        self.leases: dict[int, Lease] = {}
        self._next_lease_id = 0
        self.routing = RoutingState(LengthStatistics(settings.max_new_tokens))
        self.scaling = ScalingState()
        self.version_check = VersionCheck()
        self.evaluations = EvaluationState()
        self.ending = EndingState()

    # ------------------------------------------------------------ effects

    def emit(self, effect: Effect) -> None:
        """Add an effect of the current event."""
        self._effects.append(effect)

    def note(self, kind: NoteKind, text: str) -> None:
        """Add a note for the log."""
        self.emit(Note(kind=kind, text=text))

    def take_effects(self) -> list[Effect]:
        """Return and clear the effects, ledger effects first, otherwise in order."""
        # The shell commits the former before it sends the latter (effects.py): no process is notified of a state that a
        # crash could undo.
        effects, self._effects = self._effects, []
        return [*(one for one in effects if one.is_ledger), *(one for one in effects if not one.is_ledger)]

    # ------------------------------------------------------------ leases

    def start_lease_ids(self) -> None:
        """Start lease ids of a new session, which no earlier session used."""
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
        """Record a lease and use one of the worker's credits. num_tokens: known tokens of the answer."""
        assert worker.free > 0
        self._next_lease_id += 1
        lease = Lease(self._next_lease_id, purpose, group_id, sample_index, worker.name, min_version, num_tokens)
        self.leases[lease.lease_id] = lease
        self.workers.book(worker, lease)
        self.weigh(lease, num_tokens)
        return lease

    def weigh(self, lease: Lease, num_tokens: int) -> None:
        """Update the estimate of the worker's remaining work after the answer has reached `num_tokens`."""
        worker = self.workers[lease.worker]
        if lease.lease_id in worker.outstanding:
            expected = self.routing.lengths.expected_left(num_tokens)
            worker.load_tokens += expected - lease.expected_tokens
            lease.expected_tokens = expected

    def release(self, lease: Lease) -> None:
        """Free the worker's credit; the lease is only kept if it becomes void."""
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
        """Remove a group whose fate is decided, and end its leases."""
        self.cancel([self.leases[lease_id] for lease_id in sorted(group.lease_ids)])
        self.groups.table.remove(group)
