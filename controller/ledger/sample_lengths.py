"""Lengths of drawn and of trained answers, to detect whether drops select by length.

Counts lengths by the fate of samples, and computes the shift of the trained ones and its significance. The finding is
in report/length_shift.py.

A group that takes long is more likely to be dropped as stale or timed out, and long answers take long. The remaining
answers are shorter than those that the policy generates. `record` follows the ledger's effects and counts each sample
when its group ends; groups in flight are not counted. A sample that was cut off by the end of its group would have
become longer, so lengths of drawn samples are estimated from finished and cut ones together (Kaplan and Meier, 1958).
The estimate stops where too few samples are left: longer answers count with that length, so the true shift may be
larger than the reported one.
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
"""Fates of a sample; the others are reasons of dropped groups."""
NUM_BLOCKS = 20
"""Number of blocks of groups, each of which is left out in turn (jackknife): lengths within a group are similar, so
samples are not independent, but blocks are.
"""


MIN_AT_RISK = 10
"""If samples were cut, the estimate stops at the length reached by this number of samples, so that single answers do
not determine the tail.
"""


class LengthFact(msgspec.Struct, frozen=True, kw_only=True):
    """`count` samples of ended groups of one block with this length, or with this length when they were cut."""

    cause: str
    block: int
    num_tokens: int
    is_finished: bool
    count: int


class LengthTable:
    """Number of samples by length: `counts` is int32 [2, NUM_BLOCKS, L], for finished and cut samples, by block and
    tokens.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2, NUM_BLOCKS, 64), np.int32)

    def add(self, block: int, num_tokens: int, is_finished: bool, count: int = 1) -> None:
        """Add `count` samples of one block and length."""
        if num_tokens >= self.counts.shape[2]:
            self.counts = _widened(self.counts, num_tokens + num_tokens // 4 + 1)
        self.counts[0 if is_finished else 1, block, num_tokens] += count


def _widened(counts: np.ndarray, length: int) -> np.ndarray:
    return np.pad(counts, ((0, 0), (0, 0), (0, length - counts.shape[2])))


def _sum(tables: Iterable[LengthTable]) -> np.ndarray:
    """Sum of all tables, [2, NUM_BLOCKS, L]."""
    found = [table.counts for table in tables]
    longest = max((counts.shape[2] for counts in found), default=1)
    return sum((_widened(counts, longest) for counts in found), np.zeros((2, NUM_BLOCKS, longest), np.int64))


def survival(counts_2L: np.ndarray) -> np.ndarray:
    """Estimated share of answers longer than 0, 1, 2, ... tokens (Kaplan-Meier), 0 from the longest observed length on.

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
    """Estimated mean tokens of an answer."""
    return float(survival(counts_2L).sum())


def length_figures(counts_2L: np.ndarray) -> dict[str, float]:
    """Length statistics for summary.json. tokens: sampled ones. Percentiles: the smallest sufficient lengths."""
    shares = survival(counts_2L)
    tokens = int(counts_2L.sum(0) @ np.arange(counts_2L.shape[1]))
    found: dict[str, float] = {
        "samples": int(counts_2L.sum()), "tokens": tokens, "mean": round(float(shares.sum()), 2)
    }  # fmt: skip
    for percent in (50, 99):
        found[f"p{percent}"] = int(np.argmax(shares <= 1.0 - percent / 100 + 1e-12))
    unfinished = int(counts_2L[1].sum())
    return {**found, "unfinished": unfinished} if unfinished else found


class SampleLengths:
    """Length statistics of one run."""

    def __init__(self) -> None:
        self._ended: defaultdict[str, LengthTable] = defaultdict(LengthTable)
        """Lengths by cause."""
        self._live: dict[int, dict[int, tuple[int, bool]]] = {}
        """Current tokens of each sample of a live group, and whether it is finished."""

    def restore(self, ended: Iterable[LengthFact], live: Iterable[GroupRecord]) -> None:
        """Restore the counts from an earlier session's ledger."""
        for fact in ended:
            self._ended[fact.cause].add(fact.block, fact.num_tokens, fact.is_finished, fact.count)
        for group in live:
            self._live[group.group_id] = {
                sample.sample_index: (sample.num_tokens, sample.is_finished) for sample in group.samples
            }

    def record(self, effect: Effect) -> None:
        """Process one effect of the coordinator, in order."""
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
        """Values for the row of a step, over all samples of the run so far. Empty before the first trained sample."""
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
        """`drawn`, `trained`, lost samples by cause, and the shift; empty if nothing was trained.

        shift: relative difference between the mean length of trained samples and that of trained and lost samples
        together. Filtered samples are excluded, because a filter selects by reward, on purpose. shift_z: the shift in
        standard errors.
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
        """The shift and its standard error; 0 if nothing, or too little, was lost."""
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
    """Fate of a finished sample of an ended group, from the ledger's columns."""
    if fate == "consumed":
        return TRAINED if is_kept else NOT_SCORED
    return FILTERED if fate == "filtered" else reason
