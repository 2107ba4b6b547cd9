"""Data of a probe: samples and measurements (`Seen`), and conclusions (`Finding`). Pure data.

Conclusions are drawn in findings.py, processes run in probe.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_like.probe_files import ProbeAnswer, ProbeAnswers, TryVerdict
from areal_like.wire.messages import Sampling


@dataclass(frozen=True)
class Finding:
    """One cause of a flat reward: a sentence, and how to fix it."""

    kind: str
    sentence: str
    remedy: str


@dataclass(frozen=True)
class GoldTry:
    """The content of a row's column, written as an answer in one of the common forms, and its verdict."""

    row: int
    column: str
    response: str
    verdict: TryVerdict


@dataclass(frozen=True)
class Seen:
    """Everything that a probe collected.

    verdicts: one per answer, in order; empty if the workflow is not run, because it has several turns. gold: empty if
    scoring it would cost money. trainer_logprobs: [R] for each of the first answers.
    """

    rows: list[dict[str, Any]]
    sampled: ProbeAnswers
    sampling: Sampling
    verdicts: list[TryVerdict] = field(default_factory=list)
    gold: list[GoldTry] = field(default_factory=list)
    trainer_logprobs: list[list[float]] = field(default_factory=list)
    prompt_template: str | None = None
    is_half: bool = False
    """Engine or trainer computes with 16 bits."""
    is_untrained: bool = False
    """The model is randomly initialised without supervised steps."""
    warm_start_follows: bool = False
    """The run would begin with supervised steps that the probe did not run."""

    @property
    def answers(self) -> list[ProbeAnswer]:
        """All samples."""
        return self.sampled.answers

    @property
    def values(self) -> list[float]:
        """Rewards of the samples that were scored."""
        return [one.value for one in self.verdicts if one.kind == "scored" and one.value is not None]

    @property
    def pass_rate(self) -> float | None:
        """Share of scored samples that are correct, or have a reward above 0 if no scorer reports `correct`."""
        scored = [one for one in self.verdicts if one.kind == "scored"]
        if not scored:
            return None
        passed = [(one.value or 0.0) > 0 if one.correct is None else one.correct >= 1 for one in scored]
        return sum(passed) / len(passed)

    @property
    def groups(self) -> list[list[float]]:
        """Rewards by prompt."""
        groups: dict[int, list[float]] = defaultdict(list)
        for answer, verdict in zip(self.answers, self.verdicts, strict=False):
            if verdict.kind == "scored" and verdict.value is not None:
                groups[answer.row].append(verdict.value)
        return list(groups.values())

    @property
    def signal_share(self) -> float | None:
        """Share of groups whose rewards are not all equal: the others have zero advantage."""
        groups = [group for group in self.groups if len(group) > 1]
        return sum(max(group) > min(group) for group in groups) / len(groups) if groups else None

    @property
    def cut_share(self) -> float | None:
        """Share of answers that ended at the length limit."""
        return sum(one.is_cut for one in self.answers) / len(self.answers) if self.answers else None

    @property
    def gold_values(self) -> dict[str, list[float]]:
        """By column: the best reward over the forms, for each row."""
        best: dict[str, dict[int, float]] = defaultdict(dict)
        for one in self.gold:
            if one.verdict.kind == "scored" and one.verdict.value is not None:
                rows = best[one.column]
                rows[one.row] = max(rows.get(one.row, one.verdict.value), one.verdict.value)
        return {column: list(rows.values()) for column, rows in best.items()}

    @property
    def logprob_difference(self) -> tuple[float, float] | None:
        """Mean and largest |engine - trainer| of a token's log-prob, in nats."""
        pairs = list(zip(self.answers, self.trainer_logprobs, strict=False))
        parts = [np.abs(np.subtract(one.logprobs_R, theirs)) for one, theirs in pairs if theirs]
        if not parts:
            return None
        differences = np.concatenate(parts)
        return float(differences.mean()), float(differences.max())

    @property
    def are_groups_identical(self) -> bool:
        """Whether every group consists of copies of one answer."""
        groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for one in self.answers:
            groups[one.row].append(tuple(one.tokens_R))
        counted = [group for group in groups.values() if len(group) > 1]
        return bool(counted) and all(len(set(group)) == 1 for group in counted)
