"""Metrics of an evaluation's answers: mean accuracy and pass@k, over all sets and by set.

With several sets, the overall metric is the mean over the sets, so that a large set does not outweigh a small one. The
coordinator runs evaluations.

Legend: n answers of a row that have a score, c of them solve the row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from controller.config.eval_metrics import ACCURACY, PASS, chosen_ks
from controller.data.eval_layout import EvalLayout


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k answers, drawn without replacement from n of which c are right, is right: the unbiased
    estimator 1 - C(n - c, k) / C(n, k) of arXiv 2107.03374, section 2.1, equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not 0 < k <= n:
        raise ValueError(f"k in pass@k must be between 1 and the number of answers ({n}), but is {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def metrics_of(
    values: Sequence[float | None], layout: EvalLayout | None = None, *, solved: float = 1.0
) -> dict[str, float]:
    """Metrics of an evaluation by name: `accuracy`, with several answers per row `pass_at_K`, and with several sets the
    same names with the suffix `/SET`. An answer without a score is not counted; a row with fewer than k scored answers
    is left out of pass@k. Empty if no answer has a score.

    Args:
        values: values by number of the answer; None: no score.
        layout: set, row and sample of each answer; None: one set with one answer per row.
        solved: an answer of at least this value solves its row.
    """
    if layout is None or layout.is_plain:
        return _of_rows([[value] for value in values], (), solved)
    by_row: dict[str, dict[int, list[float | None]]] = {name: {} for name in layout.names}
    for number, value in enumerate(values):
        name, row, _ = layout[number]
        if layout.is_red_team(number):
            continue
        by_row[name].setdefault(row, []).append(value)
    ks = chosen_ks(layout.num_samples)
    of_set = {name: _of_rows(rows.values(), ks, solved) for name, rows in by_row.items()}
    if len(of_set) == 1:
        return next(iter(of_set.values()))
    names = dict.fromkeys(name for found in of_set.values() for name in found)
    means = {name: _mean([found[name] for found in of_set.values() if name in found]) for name in names}
    return means | {f"{name}/{of}": value for of, found in of_set.items() for name, value in found.items()}


def _of_rows(rows: Iterable[Sequence[float | None]], ks: Sequence[int], solved: float) -> dict[str, float]:
    scored = [[value for value in row if value is not None] for row in rows]
    flat = [value for row in scored for value in row]
    found = {ACCURACY: _mean(flat)} if flat else {}
    for k in ks:
        each = [pass_at_k(len(row), sum(value >= solved for value in row), k) for row in scored if len(row) >= k]
        found |= {f"{PASS}{k}": _mean(each)} if each else {}
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
