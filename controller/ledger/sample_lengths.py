"""Lengths of the answers that were drawn, and of those that are trained on: do drops select by length?

Owns: counts of lengths by what became of the samples, the shift of the trained ones and its significance. Refuses:
deciding what becomes of a sample (group_outcome.py), judging a run (report/length_shift.py).

A group that takes long is more likely to be dropped as stale or timed out, and long answers take long. What remains is
shorter than what the policy generates. `record` follows the ledger's effects and counts each sample when its group
ends; groups still in flight count nowhere. A sample that was cut off by the end of its group would have become longer
than it is, so lengths of drawn samples are estimated from finished and cut ones together (Kaplan and Meier, 1958). The
estimate stops where too few samples are left: longer answers count as that long, and the true shift may be larger than
the one reported.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from controller.coordinator.effects import DropGroup, Effect, FilterGroup, RecordBatch, StoreFinished, StorePartial
from controller.coordinator.snapshot import GroupRecord

TRAINED, FILTERED, NOT_SCORED = "trained", "filtered", "not_scored"
"""What becomes of a sample; the others are reasons of dropped groups."""
NUM_BLOCKS = 20
"""Groups are dealt to so many blocks, each of which is left out in turn (jackknife): within a group lengths are alike,
so samples are not independent, but blocks are."""


MIN_AT_RISK = 10
"""Where samples were cut, the estimate stops at the length that so few reached: one answer would decide on the tail."""


class LengthFact(msgspec.Struct, frozen=True, kw_only=True):
    """`count` samples of ended groups of one block that were as long, or that long when they were cut."""

    cause: str
    block: int
    num_tokens: int
    is_finished: bool
    count: int


class LengthTable:
    """Samples by length: `counts` is int32 [2, NUM_BLOCKS, L], of finished and of cut ones, by block and tokens."""

    def __init__(self) -> None:
        self.counts = np.zeros((2, NUM_BLOCKS, 64), np.int32)

    def add(self, block: int, num_tokens: int, is_finished: bool, count: int = 1) -> None:
        """`count` samples of one block and length."""
        if num_tokens >= self.counts.shape[2]:
            self.counts = _widened(self.counts, num_tokens + num_tokens // 4 + 1)
        self.counts[0 if is_finished else 1, block, num_tokens] += count


def _widened(counts: np.ndarray, length: int) -> np.ndarray:
    return np.pad(counts, ((0, 0), (0, 0), (0, length - counts.shape[2])))


def _sum(tables: Iterable[LengthTable]) -> np.ndarray:
    """[2, NUM_BLOCKS, L] of all tables."""
    found = [table.counts for table in tables]
    longest = max((counts.shape[2] for counts in found), default=1)
    return sum((_widened(counts, longest) for counts in found), np.zeros((2, NUM_BLOCKS, longest), np.int64))


def survival(counts_2L: np.ndarray) -> np.ndarray:
    """Estimated share of answers longer than 0, 1, 2, ... tokens (Kaplan-Meier), 0 from the longest seen on.

    counts_2L: finished and cut samples by length, at least one.
    """
    ended_L, cut_L = counts_2L
    at_risk_L = np.cumsum((ended_L + cut_L)[::-1])[::-1]
    least = max(1, min(MIN_AT_RISK, int(at_risk_L[0]) // 100)) if cut_L.any() else 1
    enough = int(np.count_nonzero(at_risk_L >= least))
    shares: np.ndarray = np.cumprod(1.0 - ended_L[:enough] / at_risk_L[:enough])
    shares[-1] = 0.0
    return shares


def mean_length(counts_2L: np.ndarray) -> float:
    """Estimated tokens an answer."""
    return float(survival(counts_2L).sum())


def length_figures(counts_2L: np.ndarray) -> dict[str, float]:
    """For summary.json. Percentiles are the smallest lengths that suffice."""
    shares = survival(counts_2L)
    found: dict[str, float] = {"samples": int(counts_2L.sum()), "mean": round(float(shares.sum()), 2)}
    for percent in (50, 99):
        found[f"p{percent}"] = int(np.argmax(shares <= 1.0 - percent / 100 + 1e-12))
    unfinished = int(counts_2L[1].sum())
    return {**found, "unfinished": unfinished} if unfinished else found


class SampleLengths:
    """Follows one run."""

    def __init__(self) -> None:
        self._ended: defaultdict[str, LengthTable] = defaultdict(LengthTable)
        """By cause."""
        self._live: dict[int, dict[int, tuple[int, bool]]] = {}
        """Tokens of each sample of a live group so far, and whether it is finished."""

    def restore(self, ended: Iterable[LengthFact], live: Iterable[GroupRecord]) -> None:
        """What an earlier session of the run left in the ledger."""
        for fact in ended:
            self._ended[fact.cause].add(fact.block, fact.num_tokens, fact.is_finished, fact.count)
        for group in live:
            self._live[group.group_id] = {
                sample.sample_index: (sample.num_tokens, sample.is_finished) for sample in group.samples
            }

    def record(self, effect: Effect) -> None:
        """One effect of the coordinator, in order."""
        match effect:
            case StorePartial():
                self._sample(effect.group_id, effect.sample_index, effect.start + effect.num_tokens, False)
            case StoreFinished(purpose="train", outcome=outcome):
                self._sample(outcome.group_id, outcome.sample_index, outcome.num_tokens, True)
            case DropGroup():
                self._end(effect.group_id, effect.reason)
            case FilterGroup():
                self._end(effect.group_id, FILTERED)
            case RecordBatch(is_replay=False):
                for group in effect.groups:
                    self._consume(group.group_id, set(group.sample_indices))
            case _:
                pass

    def _sample(self, group_id: int, index: int, num_tokens: int, is_finished: bool) -> None:
        self._live.setdefault(group_id, {})[index] = (num_tokens, is_finished)

    def _end(self, group_id: int, cause: str) -> None:
        for num_tokens, is_finished in self._live.pop(group_id, {}).values():
            self._ended[cause].add(group_id % NUM_BLOCKS, num_tokens, is_finished)

    def _consume(self, group_id: int, kept: set[int]) -> None:
        for index, (num_tokens, _) in self._live.pop(group_id, {}).items():
            cause = TRAINED if index in kept else NOT_SCORED
            self._ended[cause].add(group_id % NUM_BLOCKS, num_tokens, True)

    # ------------------------------------------------------------ figures

    def row(self) -> dict[str, float]:
        """For the row of a step: of all samples of the run so far. Empty while nothing was trained on."""
        found = self.summary()
        if not found:
            return {}
        values = {
            f"{name}_len_{key}": float(found[name][key])
            for name in ("drawn", "trained")
            for key in ("mean", "p50", "p99")
        }
        return {**values, "length_shift": found["shift"], "length_shift_z": found["shift_z"]}

    def summary(self) -> dict[str, Any]:
        """`drawn`, `trained`, what was lost by cause, and the shift; empty where nothing was trained on.

        shift: by which share the mean length of trained samples exceeds (below 0: falls short of) that of trained and
        lost samples together. Filtered ones are left out of it: a filter selects by reward, on purpose. shift_z: the
        shift in standard errors.
        """
        known = {cause: table for cause, table in sorted(self._ended.items()) if table.counts.any()}
        if TRAINED not in known:
            return {}
        figures = {cause: length_figures(table.counts.sum(1)) for cause, table in known.items()}
        shift, error = self._shift()
        return {
            "drawn": length_figures(_sum(known.values()).sum(1)),
            "trained": figures.pop(TRAINED),
            "lost": figures,
            "shift": round(shift, 4),
            "shift_z": round(shift / error, 1) if error > 0 else 0.0,
        }

    def _shift(self) -> tuple[float, float]:
        """The shift and its standard error; 0 where nothing was lost, or too little to tell."""
        tables = {cause: table for cause, table in self._ended.items() if cause != FILTERED}
        both = _sum(tables.values())
        kept = _widened(self._ended[TRAINED].counts, both.shape[2])
        if not (both - kept).any():
            return 0.0, 0.0
        shift = _shift_of(kept.sum(1), both.sum(1))
        if not kept.any(axis=(0, 2)).all():
            return shift, 0.0
        without = [_shift_of(kept.sum(1) - kept[:, block], both.sum(1) - both[:, block]) for block in range(NUM_BLOCKS)]
        return shift, math.sqrt((NUM_BLOCKS - 1) * float(np.var(without)))


def _shift_of(kept_2L: np.ndarray, both_2L: np.ndarray) -> float:
    return mean_length(kept_2L) / mean_length(both_2L) - 1.0


def cause_of(fate: str, reason: str, is_kept: bool) -> str:
    """What became of a finished sample of an ended group, from the ledger's columns."""
    if fate == "consumed":
        return TRAINED if is_kept else NOT_SCORED
    return FILTERED if fate == "filtered" else reason
