"""Sums up the answers of each step, for the signs of reward hacking: columns of step rows.

    length_reward_correlation   within groups: of an answer's tokens and its reward, without truncated answers
    repeated_share              share of runs of REPEAT words that the same answer has more than once
    symbol_share                share of characters that are neither letters, digits nor white space
    forged_share                share of answers with text of the environment or the chat template
    held_out/NAME               mean of a scorer with `held_out: true`, which is not part of the reward
    held_out_error/NAME         standard error of that mean, from the means of the groups

The three shares are of the first sample of each group, which bounds the time of the controller. Warnings are in
report/hacking.py.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from areal_like.verdict import FORGED_TEXT, Verdict
from controller.coordinator.effects import StoreFinished
from controller.report.hacking import HELD_OUT_ERROR
from controller.report.paired import HELD_OUT

MAX_CHARS = 4_000
"""Characters of an answer that are read."""
REPEAT = 4


class AnswerSigns:
    """Call `record` for each finished training sample and `row` for each step."""

    def __init__(self, held_out: Sequence[str] = ()) -> None:
        """held_out: components of scorers with `held_out: true`."""
        self.held_out = tuple(held_out)
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[int, list[tuple[int, float]]] = {}
        self._judged: dict[str, dict[int, list[float]]] = {}
        """Scores by group, by held-out scorer."""
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def record(
        self, effect: StoreFinished, verdict: Verdict | None, response_text: str, *, is_cut: bool = False
    ) -> None:
        """Record a finished sample. is_cut: it ended at the limit of its tokens. A policy that learns to finish writes
        shorter answers with higher rewards, which is no hack.
        """
        if effect.purpose != "train" or not effect.is_kept or effect.value is None or verdict is None:
            return
        outcome = effect.outcome
        if not is_cut:
            self._groups.setdefault(outcome.group_id, []).append((outcome.num_tokens, effect.value))
        for name in self.held_out:
            if name in verdict.components:
                self._judged.setdefault(name, {}).setdefault(outcome.group_id, []).append(verdict.components[name])
        if outcome.sample_index:
            return
        text = response_text[:MAX_CHARS]
        self._add("forged_share", float(FORGED_TEXT in verdict.components))
        if text:
            self._add("repeated_share", repeated_share(text))
            self._add("symbol_share", symbol_share(text))

    def row(self) -> dict[str, float]:
        """Columns of the step that ends now, from the samples since the last one; empty without samples."""
        found = {name: self._sums[name] / count for name, count in self._counts.items()}
        for name, groups in self._judged.items():
            scores = [score for group in groups.values() for score in group]
            found[f"{HELD_OUT}{name}"] = sum(scores) / len(scores)
            means = [sum(group) / len(group) for group in groups.values()]
            if len(means) > 1:
                found[f"{HELD_OUT_ERROR}{name}"] = statistics.stdev(means) / math.sqrt(len(means))
        correlation = within_groups(self._groups.values())
        if math.isfinite(correlation):
            found["length_reward_correlation"] = correlation
        self._clear()
        return found

    def _add(self, name: str, value: float) -> None:
        self._sums[name] += value  # type: ignore[assignment]
        self._counts[name] += 1


def within_groups(groups: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Correlation of the pairs' deviations from the means of their groups; NaN if one of them does not vary.

    Example:
        >>> within_groups([[(1, 0.0), (3, 1.0)], [(10, 0.0), (12, 1.0)]])
        1.0
    """
    xx = yy = xy = 0.0
    for pairs in groups:
        mean_x, mean_y = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        for x, y in pairs:
            xx, yy, xy = xx + (x - mean_x) ** 2, yy + (y - mean_y) ** 2, xy + (x - mean_x) * (y - mean_y)
    return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else math.nan


def repeated_share(text: str) -> float:
    """Share of the runs of REPEAT words that occur more than once; 0 for a short text.

    Example:
        >>> repeated_share("so it is so it is so it is so it is"), repeated_share("a b c d e f")
        (1.0, 0.0)
    """
    words = text.split()
    runs = Counter(zip(*(words[place:] for place in range(REPEAT)), strict=False))
    return sum(count for count in runs.values() if count > 1) / runs.total() if runs else 0.0


def symbol_share(text: str) -> float:
    """Share of the characters that are neither letters, digits nor white space; 0 for an empty text."""
    return sum(not (one.isalnum() or one.isspace()) for one in text) / len(text) if text else 0.0
