"""One evaluation at one pinned policy version."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from controller.coordinator.events import EvalKind


@dataclass(slots=True)
class EvalJob:
    """One evaluation. All tokens of its answers must be sampled by `version`."""

    version: int
    requested_version: int
    manifest_path: str
    lineage: str
    kind: EvalKind
    num_rows: int
    pending: list[int]
    values: dict[int, float | None] = field(default_factory=dict)
    losses: Counter[int] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    """Running leases by worker."""
    lease_ids: set[int] = field(default_factory=set)
    workers: set[str] = field(default_factory=set)
    deadline_s: float = 0.0

    @property
    def wants_all(self) -> bool:
        """Baseline and final evaluation run on all workers."""
        return self.kind != "periodic"

    def next_row(self) -> int | None:
        """Return an eval row that waits for a lease."""
        return heapq.heappop(self.pending) if self.pending else None
