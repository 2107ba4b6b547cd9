"""Outcome of one sample: the facts that its event, its effect and its row in the ledger share.

A fact that the ledger should keep of every finished sample is added here once, as a field and in `from_message`;
controller/ledger/transaction.py stores it without further edits.
"""

from __future__ import annotations

import msgspec

from areal_like.verdict import VerdictKind
from areal_like.wire.messages import SampleFinished

MAX_REASON_CHARS = 300
"""Maximum characters kept of the reason of a missing score, and of an error in a worker."""


class SampleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A finished and judged sample, without its tokens.

    Example: lease 7 ended with 120 tokens, the first 80 under version 3 and the rest under 4, and was judged 1.0.

        >>> SampleOutcome(lease_id=7, group_id=2, sample_index=0, num_tokens=120, first_version=3, last_version=4,
        ...               verdict_kind="scored", value=1.0)
    """

    lease_id: int
    group_id: int
    """The row, for an evaluation."""
    sample_index: int
    num_tokens: int
    """Sampled tokens of all its trajectories."""
    first_version: int
    """Version of the oldest token of any trajectory, from which staleness is counted."""
    last_version: int
    """Version of the newest token of any trajectory."""
    verdict_kind: VerdictKind
    value: float | None = None
    """Raw reward if verdict_kind is "scored"; a policy may replace it (StoreFinished.value)."""
    failed_in: str = ""
    """Scorer that gave no score, if known."""
    reason: str = ""
    """Why there is no score."""

    @classmethod
    def from_message(cls, message: SampleFinished, *, is_eval: bool) -> SampleOutcome:
        """Make an outcome from a worker's message.

        For an evaluation the component `correct` counts if the scorer has one: accuracy, not reward.
        """
        verdict, trajectories = message.verdict, message.trajectories
        value = verdict.components.get("correct", verdict.value) if is_eval and verdict.is_scored else verdict.value
        return cls(
            lease_id=message.lease_id,
            group_id=message.group_id,
            sample_index=message.sample_index,
            num_tokens=sum(one.num_sampled for one in trajectories),
            first_version=min(one.first_version for one in trajectories),
            last_version=max(one.last_version for one in trajectories),
            verdict_kind=verdict.kind,
            value=value,
            failed_in=verdict.failed_in,
            reason=verdict.reason[:MAX_REASON_CHARS] if not verdict.is_scored else "",
        )
