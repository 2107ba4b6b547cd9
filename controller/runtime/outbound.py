"""Sends the coordinator's messages: leases with their rows and prefixes, batches with their payloads, and short
messages.

Makes the message of each `Send...` effect, and records unreachable peers and leases of evaluations. What is sent is
decided in coordinator.py; of the ledger only prefixes and payloads are read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from areal_like.trajectory import Segment
from areal_like.transport.channel import Hub
from areal_like.wire import messages as m
from controller.coordinator.effects import LeaseOrder, SendBatch, SendLeases, SendRelease, SendVersion
from controller.coordinator.events import WorkerLost
from controller.coordinator.snapshot import Counts
from controller.data.eval_layout import EvalLayout
from controller.ledger.ledger import Ledger

log = logging.getLogger(__name__)


class Rows(Protocol):
    """Access to the data row of a draw (training) or of an evaluation."""

    def train(self, group_id: int) -> Mapping[str, Any]: ...

    def eval(self, index: int) -> Mapping[str, Any]: ...

    @property
    def layout(self) -> EvalLayout:
        """Which answer of an evaluation is whose."""
        ...


@dataclass(frozen=True)
class TaskSettings:
    """Settings of sampling tasks."""

    seed: int
    train_sampling: m.Sampling
    eval_sampling: m.Sampling
    segment_tokens: int = 0
    forced_lengths: Callable[[int, int], int] | None = None
    """Forced tokens of the answer of (group, sample) in training, samples counted from 1; None: not forced."""
    load_deadline_s: float = 120.0
    """Deadline for a worker to fetch an announced version onto its host."""


def stream_seed(seed: int, purpose: m.Purpose, group_id: int, sample_index: int) -> int:
    """Seed of one sample's random stream: 62 bits, a pure function of the run's seed and the sample's name."""
    name = f"{seed}/{purpose}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 2


class Outgoing:
    """Sends messages. `is_live(lease_id)`: whether the lease is still valid. `on_unreachable(name)`: called when a peer
    is removed from the hub.
    """

    def __init__(
        self,
        hub: Hub,
        ledger: Ledger,
        rows: Rows,
        settings: TaskSettings,
        *,
        is_live: Callable[[int], bool],
        on_unreachable: Callable[[str], None],
    ) -> None:
        self._hub, self._ledger, self._rows, self._settings = hub, ledger, rows, settings
        self._is_live, self._on_unreachable = is_live, on_unreachable
        self._eval_leases: set[int] = set()
        self._lost: list[WorkerLost] = []

    def is_eval(self, lease_id: int) -> bool:
        """Return whether the lease is for an evaluation in progress."""
        return lease_id in self._eval_leases

    def forget_ended_evals(self) -> None:
        """Remove the leases of evaluations that have ended."""
        self._eval_leases = {lease_id for lease_id in self._eval_leases if self._is_live(lease_id)}

    def take_lost(self) -> list[WorkerLost]:
        """Rollout workers that could not be reached since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def leases(self, effect: SendLeases) -> bool:
        """Send the leases that are still valid; return False if there is none.

        A later event of the same burst may have ended a lease that an earlier one made.
        """
        live = [order for order in effect.leases if self._is_live(order.lease_id)]
        if live:
            self.send(effect.worker, m.Lease(tasks=tuple(self._task(order) for order in live)))
        return bool(live)

    def batch(self, effect: SendBatch, counts: Counts) -> m.Batch:
        """Send the batch with its payloads and position; return the sent message."""
        position = m.RunPosition(
            ledger_seq=self._ledger.seq,
            drawn=counts.drawn,
            filtered=counts.filtered,
            dropped=sum(counts.dropped.values()),
            staleness=tuple(effect.step - 1 - group.first_version for group in (*effect.groups, *effect.reused)),
        )
        batch = m.Batch(
            step=effect.step,
            lineage=effect.lineage,
            samples=self._ledger.batch_samples(effect.groups, effect.reused),
            is_replay=effect.is_replay,
            position=position,
        )
        self.send("trainer", batch)
        return batch

    def version(self, effect: SendVersion) -> None:
        """Announce a version to the process it is addressed to; a successor receives an announcement when it has
        joined.
        """
        if self._is_replaced(effect):
            log.info(
                "version %d is not announced to %s, because the worker was restarted", effect.version, effect.worker
            )
            return
        announcement = m.AnnounceVersion(
            version=effect.version,
            lineage=effect.lineage,
            manifest_path=effect.manifest_path,
            deadline_s=self._settings.load_deadline_s,
            is_held=effect.is_held,
        )
        self.send(effect.worker, announcement)

    def release(self, effect: SendRelease) -> None:
        """Request the process to release its memory; a successor has none."""
        if self._is_replaced(effect):
            log.info("%s is not asked to release its memory, because the worker was restarted", effect.worker)
            return
        self.send(effect.worker, m.ReleaseMemory(number=effect.number))

    def _is_replaced(self, effect: SendVersion | SendRelease) -> bool:
        """Return whether the process that the effect is addressed to was replaced by another of the same name."""
        info = self._hub.peers.get(effect.worker)
        return info is not None and info.incarnation != effect.incarnation

    def send(self, peer: str, message: m.Message) -> None:
        """Send a message; an unreachable peer is removed. When it sends Hello again, both sides repeat pending
        messages.

        A rollout worker's leases continue on other workers meanwhile; a trainer requests its batch again.
        """
        if self._hub.send(peer, message):
            return
        log.warning("%s is unreachable, so a message of type %s was not sent", peer, type(message).__name__)
        info = self._hub.peers.get(peer)
        if info is None:
            return
        self._hub.forget(peer)
        self._on_unreachable(peer)
        if info.role == "rollout":
            lost = WorkerLost(worker=peer, reason="unreachable", incarnation=info.incarnation, may_live=True)
            self._lost.append(lost)

    def _task(self, order: LeaseOrder) -> m.SampleTask:
        is_eval, settings = order.purpose == "eval", self._settings
        if is_eval:
            self._eval_leases.add(order.lease_id)
        row = self._rows.eval(order.group_id) if is_eval else self._rows.train(order.draw)
        prefix, checkpoint = Segment.empty(), None
        if order.prefix_tokens:
            prefix = self._ledger.prefix(order.group_id, order.sample_index)
            assert len(prefix) == order.prefix_tokens, "ledger and coordinator disagree on a prefix"
            checkpoint = self._ledger.turn_checkpoint(order.group_id, order.sample_index)
        return m.SampleTask(
            lease_id=order.lease_id,
            group_id=order.group_id,
            sample_index=order.sample_index,
            purpose=order.purpose,
            min_version=order.min_version,
            row=dict(row),
            sampling=settings.eval_sampling if is_eval else self._train_sampling(order),
            seed=stream_seed(settings.seed, order.purpose, order.group_id, order.sample_index),
            prefix=prefix,
            checkpoint=checkpoint,
            moved_from=order.moved_from,
            segment_tokens=0 if is_eval else settings.segment_tokens,
        )

    def _train_sampling(self, order: LeaseOrder) -> m.Sampling:
        sampling, forced = self._settings.train_sampling, self._settings.forced_lengths
        if forced is None:
            return sampling
        return msgspec.structs.replace(sampling, max_new_tokens=forced(order.group_id, order.sample_index + 1))
