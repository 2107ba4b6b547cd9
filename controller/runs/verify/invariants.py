"""Names of the invariants that can be recounted from a run's files (docs/architecture.md)."""

from __future__ import annotations

CHAIN = "recorded-chain"
INVARIANTS = (
    "bounded-admission", "bounded-staleness", "exactly-once", "stamped-versions", "exact-interruption", CHAIN,
)  # fmt: skip
