"""Compares the share of solved rows in slices of an evaluation with the rest: intervals, tests, and their correction.

Slices are made in eval_slices.py. Nothing is read or stored here.

Several answers to one row are not independent. Their numbers are therefore divided by the design effect
1 + (m - 1) * ICC, for m answers per row and the intraclass correlation ICC (Kish, Survey Sampling, 1965, section 5.4).
With one answer per row it is 1, and the test is exact.

Legend: N answers with a score.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

Z_95 = 1.959963984540054
"""Quantile of the normal distribution for intervals of 95 %."""
MIN_ANSWERS = 10
"""A slice is compared if it and the rest have at least this many answers, also after division by the design effect."""
ALPHA = 0.01
"""A slice is weak if its corrected p-value is below this."""
MIN_DIFFERENCE = 0.05
"""Smallest difference to the rest of a weak slice; in large evaluations smaller ones are significant too."""
_TIE = 1e-7
"""Relative tolerance for equal probabilities, which rounding makes different."""

Name = TypeVar("Name", bound=Hashable)


class Share(NamedTuple):
    """Solved answers of all answers; not integers after division by a design effect."""

    solved: float
    answers: float

    @property
    def value(self) -> float:
        """solved / answers"""
        return self.solved / self.answers

    def without_repeats(self, effect: float) -> Share:
        """The share of as many independent answers as this one is worth."""
        return Share(self.solved / effect, self.answers / effect)


@dataclass(frozen=True)
class SliceResult:
    """A slice compared with all other answers of the evaluation. Intervals have 95 %."""

    num_rows: int
    share: Share
    interval: tuple[float, float]
    rest: Share
    difference: float
    """Of the slice to the rest."""
    difference_interval: tuple[float, float]
    p: float | None
    """Two-sided p-value; None: the slice or the rest is too small."""
    p_corrected: float | None
    """After Holm's correction for all slices of the evaluation."""

    @property
    def is_weak(self) -> bool:
        """Whether the slice is solved less often than the rest, by more than chance."""
        is_significant = self.p_corrected is not None and self.p_corrected < ALPHA
        return is_significant and self.difference <= -MIN_DIFFERENCE


def compare(
    members: Mapping[Name, np.ndarray], is_solved_N: np.ndarray, row_N: np.ndarray
) -> tuple[dict[Name, SliceResult], float]:
    """Compare every slice with the rest; return the results, and the design effect.

    Args:
        members: for each slice which answers belong to it, bool, N.
        is_solved_N: whether the answer solves its row, bool.
        row_N: number of the answer's row, int.
    """
    effect = design_effect(is_solved_N, row_N)
    p_of_test: dict[bytes, float] = {}
    tests: dict[Name, bytes] = {}
    for name, is_member_N in members.items():
        share, rest = (_share(is_solved_N[mask]).without_repeats(effect) for mask in (is_member_N, ~is_member_N))
        if min(share.answers, rest.answers) < MIN_ANSWERS:
            continue
        # A slice and its complement are one test.
        tests[name] = min(is_member_N.tobytes(), (~is_member_N).tobytes())
        p_of_test[tests[name]] = fisher(share, rest)
    corrected = dict(zip(p_of_test, holm(list(p_of_test.values())), strict=True))
    found = {}
    for name, is_member_N in members.items():
        share, rest = _share(is_solved_N[is_member_N]), _share(is_solved_N[~is_member_N])
        if not share.answers or not rest.answers:
            continue
        test = tests.get(name)
        found[name] = SliceResult(
            num_rows=len(np.unique(row_N[is_member_N])),
            share=share,
            interval=wilson(share.without_repeats(effect)),
            rest=rest,
            difference=share.value - rest.value,
            difference_interval=newcombe(share.without_repeats(effect), rest.without_repeats(effect)),
            p=None if test is None else p_of_test[test],
            p_corrected=None if test is None else corrected[test],
        )
    return found, effect


def wilson(share: Share, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share (Wilson, JASA 22, 1927).

    Example:
        >>> low, high = wilson(Share(8, 10))
        >>> round(low, 3), round(high, 3)
        (0.49, 0.943)
    """
    n, p = share.answers, share.value
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(one: Share, other: Share) -> tuple[float, float]:
    """Interval of the difference of two independent shares (Newcombe, Statistics in Medicine 17, 1998, method 10)."""
    difference = one.value - other.value
    (low, high), (other_low, other_high) = wilson(one), wilson(other)
    below = math.hypot(one.value - low, other_high - other.value)
    above = math.hypot(high - one.value, other.value - other_low)
    return difference - below, difference + above


def fisher(one: Share, other: Share) -> float:
    """Two-sided p-value of Fisher's exact test for two shares, whose numbers are rounded to integers.

    The sum of the probabilities of all tables with the same margins that are at most as probable as the given one.

    Example:
        >>> round(fisher(Share(1, 10), Share(8, 10)), 5)
        0.00548
    """
    size, rest = round(one.answers), round(other.answers)
    solved = min(round(one.solved), size)
    total = solved + min(round(other.solved), rest)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, size + rest + 1)))))

    def log_choose(n: int, k: np.ndarray) -> np.ndarray:
        chosen: np.ndarray = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
        return chosen

    possible = np.arange(max(0, total - rest), min(size, total) + 1)
    logs = log_choose(size, possible) + log_choose(rest, total - possible)
    probabilities = np.exp(logs - logs.max())
    probabilities /= probabilities.sum()
    observed = probabilities[solved - possible[0]]
    return min(1.0, float(probabilities[probabilities <= observed * (1 + _TIE)].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values: the probability of any false finding stays below the level, whatever depends on what (Holm,
    Scandinavian Journal of Statistics 6, 1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def design_effect(is_solved_N: np.ndarray, row_N: np.ndarray) -> float:
    """The number of answers that are worth one independent answer, at least 1; 1 with one answer per row.

    The intraclass correlation is the estimate by analysis of variance, between 0 and 1.
    """
    _, place_N = np.unique(row_N, return_inverse=True)
    counts = np.bincount(place_N)
    num_rows, num_answers = len(counts), len(row_N)
    if num_rows < 2 or num_answers == num_rows:
        return 1.0
    values = is_solved_N.astype(np.float64)
    means = np.bincount(place_N, weights=values) / counts
    between = float((counts * (means - values.mean()) ** 2).sum()) / (num_rows - 1)
    within = float(((values - means[place_N]) ** 2).sum()) / (num_answers - num_rows)
    size = (num_answers - float((counts**2).sum()) / num_answers) / (num_rows - 1)
    total = between + (size - 1) * within
    correlation = min(1.0, max(0.0, (between - within) / total)) if total > 0 else 1.0
    return 1.0 + (num_answers / num_rows - 1.0) * correlation


def _share(is_solved: np.ndarray) -> Share:
    return Share(float(is_solved.sum()), float(len(is_solved)))
