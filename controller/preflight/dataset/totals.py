"""What each stage removed: counts by reason, and some examples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from controller.preflight.dataset.port import Finding, Row
from controller.preflight.dataset.text import excerpt

MAX_REASONS = 50
"""Number of different reasons that are counted one by one; a user's function may return any text."""
OTHER = "other reasons"


@dataclass
class StageTotals:
    """Rows that one stage saw and removed."""

    kind: str
    options: dict[str, Any]
    is_private: bool
    num_examples: int
    num_in: int = 0
    num_removed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Row, finding: Finding) -> None:
        """Count a removed row."""
        self.num_removed += 1
        is_known = finding.reason in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[finding.reason if is_known else OTHER] += 1
        if len(self.examples) < self.num_examples:
            example = {"where": row.where, "reason": finding.reason, "evidence": finding.evidence}
            shown = {} if self.is_private or row.fault else {"prompt": excerpt(row.prompt)}
            self.examples.append({**example, **shown})

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "kind": self.kind,
            "options": self.options,
            "rows_in": self.num_in,
            "removed": self.num_removed,
            "rows_out": self.num_in - self.num_removed,
            "reasons": dict(self.reasons.most_common()),
            "examples": self.examples,
        }
