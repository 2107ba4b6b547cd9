"""Compares evaluations on the rows that they share.

Two answers to one row are alike, so the difference of two evaluations of the same rows has a much smaller error than
each of them. The error is estimated from the differences of the rows, and evaluations of different numbers of rows can
be compared on those that both have: a periodic evaluation uses the first rows of a final one (data/eval_layout.py).

Records of earlier versions have only the accuracy. They are compared if they have the same number of rows, as if the
evaluations were independent, which gives a larger error.

Legend: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from controller.report.data import Row, number

ACCURACY = "accuracy"
HELD_OUT = "held_out/"
"""Prefix of the mean of a scorer with `held_out: true`, in step rows and as a quantity of evaluations."""
LEVEL = 0.00135
"""One-sided p-value of a fall before it is divided by the number of candidates: three standard errors."""
MIN_ROWS = 10
"""Shared rows below which two evaluations are not compared."""


@dataclass(frozen=True)
class Comparison:
    """An earlier evaluation compared with one or several later ones, on the rows that all of them have."""

    early: float
    late: tuple[float, ...]
    """Mean over the shared rows, of each later evaluation."""
    error: float
    """Standard error of `fall`."""
    num_rows: int

    @property
    def fall(self) -> float:
        """From the earlier evaluation to the mean of the later ones."""
        return self.early - sum(self.late) / len(self.late)

    def is_certain(self, num_candidates: int = 1) -> bool:
        """Return whether the fall exceeds chance, as the largest one of `num_candidates`."""
        return self.fall > 0 and self.fall > sigmas(num_candidates) * self.error


def compare(early: Row, late: Sequence[Row], key: str = ACCURACY) -> Comparison | None:
    """Compare evaluations; None if they share too few rows.

    Args:
        early: row of kind `eval`, with the values of its answers under `values` if they are known.
        late: rows of later evaluations.
        key: `accuracy`, or `held_out/NAME`.
    """
    values = [_row_means(one, key) for one in (early, *late)]
    if any(one is None for one in values):
        return _unpaired(early, late) if key == ACCURACY else None
    num_rows = min(len(one) for one in values if one is not None)
    table = np.stack([one[:num_rows] for one in values if one is not None])
    table = table[:, np.isfinite(table).all(axis=0)]
    n = table.shape[1]
    if n < MIN_ROWS:
        return None
    differences_N = table[0] - table[1:].mean(axis=0)
    scale = float(max(1.0, np.abs(table).max())) if key == ACCURACY else float(np.ptp(table)) or 1.0
    # One row more with the largest difference, so that a few changed rows are not certain.
    squares = float(((differences_N - differences_N.mean()) ** 2).sum()) + scale**2
    return Comparison(
        early=float(table[0].mean()),
        late=tuple(float(one.mean()) for one in table[1:]),
        error=math.sqrt(squares / (n - 1) / n),
        num_rows=n,
    )


def known(evals: Iterable[Row]) -> list[Row]:
    """Evaluations with an accuracy."""
    return [row for row in evals if math.isfinite(number(row, ACCURACY))]


def held_out_names(evals: Iterable[Row]) -> list[str]:
    """Held-out scorers of evaluations, as keys for `compare`."""
    found: dict[str, None] = {}
    for row in evals:
        scores = _values(row).get("held_out")
        found.update(dict.fromkeys(f"{HELD_OUT}{name}" for name in scores) if isinstance(scores, dict) else {})
    return list(found)


def sigmas(num_candidates: int, freedom: float = math.inf) -> float:
    """Standard errors that the largest fall of `num_candidates` exceeds with the probability LEVEL, at most.

    freedom: degrees of freedom of the standard error; the quantile of the t distribution is Wallace's approximation
    (Annals of Mathematical Statistics 30, 1959).
    """
    z = NormalDist().inv_cdf(1 - LEVEL / max(1, num_candidates))
    if not math.isfinite(freedom):
        return z
    return math.sqrt(freedom * math.expm1((z * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))


def share_variance(row: Row) -> float:
    """Variance of the accuracy of one evaluation, with one solved and one wrong answer more, so that an accuracy of 0
    or 1 has a variance."""
    n = max(1.0, number(row, "num_scored", 1.0)) + 2
    share = (min(1.0, max(0.0, number(row, ACCURACY))) * (n - 2) + 1) / n
    return share * (1 - share) / n


def _unpaired(early: Row, late: Sequence[Row]) -> Comparison | None:
    rows = {number(one, "num_rows", -1.0) for one in (early, *late)}
    values = [number(one, ACCURACY) for one in (early, *late)]
    if len(rows) > 1 or not all(map(math.isfinite, values)):
        return None
    variance = share_variance(early) + sum(map(share_variance, late)) / len(late) ** 2
    return Comparison(values[0], tuple(values[1:]), math.sqrt(variance), int(max(rows)))


def _row_means(row: Row, key: str) -> np.ndarray | None:
    """Mean over the answers to each row, NaN without a score, N; None if they are not known."""
    found = _values(row)
    held_out = found.get("held_out")
    scores = found.get("values")
    if key != ACCURACY:
        scores = held_out.get(key.removeprefix(HELD_OUT)) if isinstance(held_out, dict) else None
    num_samples = found.get("num_samples", 1)
    if isinstance(scores, list):
        scores = _numbers(scores)
    if not isinstance(scores, np.ndarray) or not isinstance(num_samples, int) or num_samples < 1:
        return None
    if len(scores) % num_samples:
        return None
    by_row = scores.reshape(-1, num_samples)
    count = np.isfinite(by_row).sum(axis=1)
    means: np.ndarray = np.where(count > 0, np.nansum(by_row, axis=1) / np.maximum(count, 1), math.nan)
    return means


def as_arrays(row: Row) -> Row:
    """A row of kind `eval_values` with arrays instead of lists, for one that is compared many times."""
    values, held_out = row.get("values"), row.get("held_out")
    return {
        **row,
        **({"values": _numbers(values)} if isinstance(values, list) else {}),
        **({"held_out": {name: _numbers(one) for name, one in held_out.items()}} if isinstance(held_out, dict) else {}),
    }


def _numbers(values: Any) -> np.ndarray:
    """Values as float64, N; NaN for what is no number. Empty for what is no list."""
    known = values if isinstance(values, list) else []
    try:
        return np.array([value if isinstance(value, int | float) else math.nan for value in known], dtype=np.float64)
    except OverflowError:  # an integer beyond the range of a float, in a damaged file
        return np.full(len(known), math.nan)


def _values(row: Row) -> dict[str, Any]:
    found = row.get("values")
    return found if isinstance(found, dict) else {}
