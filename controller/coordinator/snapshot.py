"""Frozen records of the state restored from the ledger after a crash, and of counts of groups.

They are stored in controller/ledger and used in coordinator.py.
"""

from __future__ import annotations

import msgspec


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a batch: which of its samples are kept, and its first version."""

    group_id: int
    sample_indices: tuple[int, ...]
    first_version: int


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Known state of one sample of a live group. Partial: num_tokens tokens are stored. Finished: it has a verdict."""

    sample_index: int
    num_tokens: int
    first_version: int
    last_version: int
    is_finished: bool = False
    is_kept: bool = False
    value: float | None = None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A live group: drawn, and neither shipped nor dropped nor filtered. `samples`: samples with stored tokens."""

    group_id: int
    version: int
    samples: tuple[SampleRecord, ...]
    draw: int | None = None
    """Position in the draw order; None: equal to its number."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded batch (the newest record if a step was replayed)."""

    step: int
    lineage: str
    groups: tuple[BatchGroup, ...]
    reused: tuple[BatchGroup, ...] = ()
    """Groups of earlier steps that it trains on as well (`replay_buffer`)."""


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was reported complete."""

    version: int
    lineage: str
    path: str


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """All data that the coordinator needs to continue after a crash."""

    num_lineages: int
    """Number of RecordLineage rows: starts of the run and of its trainer."""
    num_trainer_restarts: int = 0
    """Number of these in which only the trainer was restarted."""
    num_drawn: int
    next_draw: int | None = None
    """Position in the draw order after the last used one; None: num_drawn."""
    num_filtered: int
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    live: tuple[GroupRecord, ...]
    """By group id."""
    batches: tuple[BatchRecord, ...]
    """By step, 1, 2, ... without gaps."""
    checkpoints: tuple[CheckpointRecord, ...]
    """Oldest first, in the order they were reported."""
    evals: tuple[int, ...]
    """Versions whose evaluation is complete."""
    stored: frozenset[int] = frozenset()
    """Consumed groups whose tokens are still stored."""

    @property
    def first_draw(self) -> int:
        """The position in the draw order that is used next."""
        return self.num_drawn if self.next_draw is None else self.next_draw

    @property
    def num_lives(self) -> int:
        """Number of starts of the run so far."""
        return self.num_lineages - self.num_trainer_restarts


class EvaluationUnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation in progress."""

    version: int
    """Version of the policy that answers."""
    num_done: int
    """Rows with an outcome."""
    num_rows: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by fate; drawn = consumed + filtered + sum(dropped) + in_flight at any time (`exactly-once`)."""

    drawn: int
    consumed: int
    """Groups in recorded batches of the surviving lineage."""
    filtered: int
    dropped: dict[str, int]
    running: int
    """Admitted groups with unfinished samples."""
    ready: int
    """Complete groups waiting for a step."""
    samples_finished: int
    """Training samples that received a verdict in this session."""

    @property
    def in_flight(self) -> int:
        """running + ready."""
        return self.running + self.ready

    def add_up(self) -> bool:
        """Return whether drawn = consumed + filtered + dropped + in flight."""
        return self.drawn == self.consumed + self.filtered + sum(self.dropped.values()) + self.in_flight
