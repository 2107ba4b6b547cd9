"""The values of each answer of an evaluation, for rows of kind `eval_values` of metrics.jsonl.

Two evaluations can then be compared on the rows that both of them have (report/paired.py). Answers to
data.red_team have no value there, but a score of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.red_team import REFUSED, SAFE
from controller.config.eval_metrics import RED_TEAM_METRICS

DIGITS = 4
"""Decimal places of a value; a solved answer is 1, which takes two characters in the file."""


class EvalValues:
    """Collects scores of held-out scorers. Call `record` for each answer and `finish` for each evaluation."""

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """held_out: components of scorers with `held_out: true`."""
        self._held_out = tuple(held_out)
        self._open: dict[int, dict[str, dict[int, float]]] = {}
        """Scores by number of the answer, by scorer, of evaluations in progress by version, and of the last one."""

    def record(self, version: int, number: int, components: Mapping[str, float]) -> None:
        """Record an answer. number: of the answer in its evaluation; components: of its verdict."""
        for name in (*self._held_out, REFUSED, SAFE):
            if name in components:
                self._open.setdefault(version, {}).setdefault(name, {})[number] = components[name]

    def finish(self, version: int, values: Sequence[float | None], *, num_samples: int = 1) -> dict[str, Any]:
        """Columns of the row of a finished evaluation, which may be the last one again, as the final one.

        Args:
            version: evaluated version.
            values: scores by number of the answer; None: no score, or not counted.
            num_samples: answers of a row, which have consecutive numbers.
        """
        for older in [other for other in self._open if other < version]:  # dropped
            del self._open[older]
        held_out = {
            name: [_short(found.get(number)) for number in range(len(values))]
            for name, found in self._open.get(version, {}).items()
            if name != REFUSED
        }
        return {
            "num_samples": num_samples, "values": [_short(value) for value in values],
            **({"held_out": held_out} if held_out else {}),
        }  # fmt: skip

    def red_team(self, version: int) -> dict[str, float]:
        """Shares of refused and of unsafe answers to data.red_team in a finished evaluation; empty without any."""
        found = self._open.get(version, {})
        safe, refused = found.get(SAFE, {}), found.get(REFUSED, {})
        if not safe:
            return {}
        shares = sum(refused.values()) / len(safe), 1.0 - sum(safe.values()) / len(safe)
        return dict(zip(RED_TEAM_METRICS, shares, strict=True))


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = round(value, DIGITS)
    return int(rounded) if rounded == int(rounded) else rounded
