"""The values of each answer of an evaluation, for rows of kind `eval_values` of metrics.jsonl.

Two evaluations can then be compared on the rows that both of them have (report/paired.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 4
"""Decimal places of a value; a solved answer is 1, which takes two characters in the file."""


class EvalValues:
    """Collects scores of held-out scorers. Call `record` for each answer and `finish` for each evaluation."""

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """held_out: components of scorers with `held_out: true`."""
        self._held_out = tuple(held_out)
        self._open: dict[int, dict[str, dict[int, float]]] = {}
        """Scores by number of the answer, by scorer, of evaluations in progress by version."""

    def record(self, version: int, number: int, components: Mapping[str, float]) -> None:
        """Record an answer. number: of the answer in its evaluation; components: of its verdict."""
        for name in self._held_out:
            if name in components:
                self._open.setdefault(version, {}).setdefault(name, {})[number] = components[name]

    def finish(
        self, version: int, values: Sequence[float | None], *, num_samples: int = 1, left_out: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Columns of the row of a finished evaluation.

        Args:
            version: evaluated version.
            values: scores by number of the answer; None: no score.
            num_samples: answers of a row, which have consecutive numbers.
            left_out: numbers of answers that do not count for the accuracy.
        """
        scores = self._open.pop(version, {})
        for older in [other for other in self._open if other < version]:  # dropped
            del self._open[older]
        skipped = frozenset(left_out)
        known = [None if number in skipped else value for number, value in enumerate(values)]
        held_out = {
            name: [None if number in skipped else _short(found.get(number)) for number in range(len(values))]
            for name, found in scores.items()
        }
        return {
            "num_samples": num_samples, "values": [_short(value) for value in known],
            **({"held_out": held_out} if held_out else {}),
        }  # fmt: skip


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = round(value, DIGITS)
    return int(rounded) if rounded == int(rounded) else rounded
