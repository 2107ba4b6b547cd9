"""The leases of a worker: those it works on, and finished samples that the controller has not acknowledged.

It bounds their number and tracks which tokens were reported. It does no I/O; time is passed in.

A lease is in one of two places: `running` (until its sample is finished, returned or cancelled) or `unacked` (until
SampleAck). The controller leases at most `capacity` samples to a worker, so both together stay within it, unless the
controller declared the worker lost and leased again: then they stay within twice that, and further leases are returned.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Literal

from areal_like.trajectory import Segment
from areal_like.wire.messages import ReturnReason, SampleFinished, SampleProgress, SampleReturned
from rollout.sample import SampleRun

Admission = Literal["new", "running", "finished", "full"]


class LeaseBook:
    """The leases of one worker."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.running: dict[int, SampleRun] = {}
        self.unacked: dict[int, SampleFinished] = {}
        self._sent_s: dict[int, float] = {}
        self._free_lanes: list[int] = []
        self._num_lanes = 0

    def admission(self, lease_id: int) -> Admission:
        """Classify a new lease: `running` and `finished` are repetitions, `full` must be refused."""
        if lease_id in self.running:
            return "running"
        if lease_id in self.unacked:
            return "finished"
        return "new" if len(self.running) + len(self.unacked) < 2 * self.capacity else "full"

    # ------------------------------------------------------------ lanes of the trace

    def take_lane(self) -> int:
        """Take the lowest free lane of the trace, so that there are few lanes."""
        if self._free_lanes:
            return heapq.heappop(self._free_lanes)
        self._num_lanes += 1
        return self._num_lanes - 1

    def give_lane(self, lane: int) -> None:
        """Free the lane of an ended sample."""
        heapq.heappush(self._free_lanes, lane)

    # ------------------------------------------------------------ reports

    def progress(self, live: Mapping[int, Segment]) -> tuple[SampleProgress, ...]:
        """New tokens of every running lease since its last report. `live` is `engine.progress()`.

        They are not marked as reported: call `mark` with the result once it was sent.
        """
        items = []
        for lease_id, run in self.running.items():
            fresh = run.all_new(live).tail(run.reported)
            if len(fresh):
                start = run.base + run.reported
                checkpoint = run.turns.checkpoint
                items.append(SampleProgress(lease_id=lease_id, start=start, segment=fresh, checkpoint=checkpoint))
        return tuple(items)

    def mark(self, items: Iterable[SampleProgress]) -> None:
        """Mark these reports as sent."""
        for item in items:
            run = self.running.get(item.lease_id)
            if run is not None:
                run.reported = max(run.reported, item.start + len(item.segment) - run.base)

    def returned(
        self, run: SampleRun, live: Mapping[int, Segment], reason: ReturnReason, detail: str = ""
    ) -> SampleReturned:
        """The message that returns a lease, with its unreported tokens."""
        rest = run.all_new(live).tail(run.reported)
        return SampleReturned(
            lease_id=run.task.lease_id, start=run.base + run.reported, segment=rest, reason=reason, detail=detail,
            checkpoint=run.turns.checkpoint if len(rest) else None,
        )  # fmt: skip

    def movable(self, lease_ids: Iterable[int]) -> list[SampleRun]:
        """Leases that may be returned without losing tokens; not those that only wait for their verdict."""
        runs = (self.running.get(lease_id) for lease_id in lease_ids)
        return [run for run in runs if run is not None and run.is_movable]

    # ------------------------------------------------------------ finished samples

    def finish(self, message: SampleFinished) -> None:
        """Move a finished sample from running to unacked."""
        self.running.pop(message.lease_id, None)
        self.unacked[message.lease_id] = message

    def ack(self, lease_ids: Iterable[int]) -> int:
        """Remove acknowledged samples. Returns the number of those that were still held."""
        num_held = 0
        for lease_id in lease_ids:
            self._sent_s.pop(lease_id, None)
            num_held += self.unacked.pop(lease_id, None) is not None
        return num_held

    def due(self, now_s: float, resend_s: float) -> list[SampleFinished]:
        """Finished samples never sent, or sent longer than `resend_s` ago and not acknowledged."""
        return [
            message
            for lease_id, message in self.unacked.items()
            if lease_id not in self._sent_s or now_s - self._sent_s[lease_id] >= resend_s
        ]

    def send_again(self) -> None:
        """Make all finished samples due again, because sent ones may not have arrived."""
        self._sent_s.clear()

    def was_sent(self, lease_id: int) -> bool:
        """Whether a finished sample was sent at least once."""
        return lease_id in self._sent_s

    def sent(self, lease_id: int, now_s: float) -> None:
        """Record that a finished sample was sent."""
        if lease_id in self.unacked:
            self._sent_s[lease_id] = now_s
