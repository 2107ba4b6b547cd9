"""Reports of simulated workers on unfinished answers: tokens so far, speeds, returned samples.

Makes the events of heartbeats and recalls. Their time is decided in world.py; migration is decided by the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_like.emulation.replica import Replica, Sequence
from areal_like.trajectory import NO_VERSION
from controller.coordinator.events import Event, LeaseReturned, PartialReport, ProgressReported, WorkerSpeed
from controller.runtime.throughput_gauge import SpeedGauge


@dataclass(slots=True)
class Lease:
    """A lease of a worker, until all its answers are finished."""

    group_id: int
    index: int
    worker: int
    left: int
    """Unfinished answers: one, or those of a whole group."""
    first_version: int = NO_VERSION


class Reporter:
    """Maps sequences to leases, and records the first version of moved samples."""

    def __init__(self) -> None:
        self._gauge = SpeedGauge()
        self._sequences: dict[int, Sequence] = {}
        self._began: dict[tuple[int, int], int] = {}
        """First version of returned samples, by group and index."""

    def began(self, lease_id: int, lease: Lease, sequence: Sequence) -> None:
        """Record that a worker has started a lease of one sample."""
        self._sequences[lease_id] = sequence
        lease.first_version = self._began.pop((lease.group_id, lease.index), NO_VERSION)

    def ended(self, lease_id: int) -> None:
        """Remove a sample that is reported as finished."""
        self._sequences.pop(lease_id, None)

    def heartbeat(self, replica: Replica, leases: dict[int, Lease]) -> list[Event]:
        """Tokens of the running answers, and the worker's speed if it has changed."""
        events: list[Event] = []
        parts = [self._part(replica, sequence, leases[sequence.lease_id]) for sequence in replica.active]
        if parts:
            events.append(ProgressReported(worker=replica.name, items=tuple(parts)))
        counters = {"tokens": replica.tokens, "steps": replica.steps, "busy_s": replica.busy_s + replica.prefill_s}
        if (speed := self._gauge.read(replica.name, "0", counters)) is not None:
            events.append(WorkerSpeed(worker=replica.name, tokens_per_s=speed[0], steps_per_s=speed[1]))
        return events

    def returned(self, replica: Replica, lease_ids: Iterable[int], leases: dict[int, Lease]) -> list[Event]:
        """Remove these samples from the worker, except those that finished meanwhile."""
        events: list[Event] = []
        for lease_id in lease_ids:
            lease = leases.get(lease_id)
            if lease is None or not lease.left:
                continue
            sequence = self._sequences.pop(lease_id)
            part = self._part(replica, sequence, lease)
            replica.remove(sequence)
            del leases[lease_id]
            if part.num_tokens:
                self._began[lease.group_id, lease.index] = lease.first_version
            events.append(LeaseReturned(worker=replica.name, part=part, reason="migrated"))
        return events

    def _part(self, replica: Replica, sequence: Sequence, lease: Lease) -> PartialReport:
        """All its tokens, from the first on: the coordinator keeps those that are new."""
        tokens = int(replica.tokens_of(sequence))
        if lease.first_version == NO_VERSION:
            tokens = 0
        return PartialReport(
            lease_id=sequence.lease_id, start=0, num_tokens=tokens, first_version=lease.first_version,
            last_version=replica.version,
        )  # fmt: skip
