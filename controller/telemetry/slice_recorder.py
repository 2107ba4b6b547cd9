"""Collects the answers of evaluations by slices, and makes the row of metrics.jsonl with their results.

Slices are made in data/eval_slices.py, compared in data/slice_statistics.py, and shown by report/slices.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_like.prompts import prompt_text
from controller.data.error_clusters import by_form, by_phrase, form_of
from controller.data.eval_slices import ANSWER_LENGTH, AUTO, Slice, quarters
from controller.data.slice_statistics import SliceResult, compare

MAX_KEPT = 2_000
"""Wrong answers of a running evaluation that are kept as examples."""
MAX_EXAMPLES = 3
"""Examples of a weak slice."""
MAX_CHARS = 500
MAX_READ = 2_000
"""Last characters of a wrong answer, of which its form is computed."""


class SliceRecorder:
    """Slices of a run's evaluations. Call `record` for each answer and `finish` for each evaluation."""

    def __init__(
        self,
        slices: Callable[[], Sequence[tuple[Slice, ...]]],
        row_of: Callable[[int], Mapping[str, Any]],
        *,
        names: Sequence[str],
        num_samples: int = 1,
        solved_value: float = 1.0,
    ) -> None:
        """
        Args:
            slices: slices of each row; called at the end of the first evaluation.
            row_of: row by number of the answer.
            names: `eval.slices`.
            num_samples: answers of a row, which have consecutive numbers.
            solved_value: an answer of at least this value solves its row.
        """
        self._make, self._row_of, self._solved_value = slices, row_of, solved_value
        self._num_samples = num_samples
        self._has_answer_length = AUTO in names or ANSWER_LENGTH in names
        self._slices: Sequence[tuple[Slice, ...]] | None = None
        self._lengths: dict[int, dict[int, int]] = {}
        """Tokens of the answers by number, of running evaluations by version."""
        self._wrong: dict[int, dict[int, str]] = {}
        self._ends: dict[int, dict[int, str]] = {}
        """Ends of the wrong answers, where the result is."""
        self._named: set[Slice] = set()
        """Weak slices that `new_weak` has returned."""
        self._weak_before: set[Slice] = set()
        """Slices that were weak in the evaluation before."""

    def record(self, version: int, number: int, num_tokens: int, answer: str, value: float | None) -> None:
        """Record an answer. number: of the answer in its evaluation; value: its score, None without one."""
        self._lengths.setdefault(version, {})[number] = num_tokens
        wrong = self._wrong.setdefault(version, {})
        if value is not None and value < self._solved_value and len(wrong) < MAX_KEPT:
            wrong[number] = _short(answer)
            self._ends.setdefault(version, {})[number] = answer[-MAX_READ:]

    def finish(self, version: int, values: Sequence[float | None]) -> dict[str, Any] | None:
        """Results of a finished evaluation, for a row of metrics.jsonl; None if there is nothing to compare, or the
        answers were already reported.

        values: scores by number of the answer; None: no score.
        """
        lengths, wrong = self._lengths.pop(version, {}), self._wrong.pop(version, {})
        ends = self._ends.pop(version, {})
        for older in [other for other in self._lengths if other < version]:  # dropped
            del self._lengths[older], self._wrong[older]
            self._ends.pop(older, None)
        numbers = np.array([number for number, value in enumerate(values) if value is not None], dtype=np.int64)
        if not lengths or not len(numbers):
            return None
        if self._slices is None:
            self._slices = self._make()
        is_solved = np.array([values[number] >= self._solved_value for number in numbers])
        row_N = numbers // self._num_samples
        members = self._members(numbers, row_N, lengths)
        found, effect = compare(members, is_solved, row_N)
        return {
            "num_rows": len(values) // self._num_samples,
            "design_effect": effect,
            "slices": [
                _fields(one, result, self._examples(members[one], numbers, wrong) if result.is_weak else [])
                for one, result in found.items()
            ],
            "clusters": self._clusters(numbers, is_solved, wrong, ends),
        }

    def new_weak(self, fields: Mapping[str, Any]) -> list[str]:
        """Sentences about slices that are weak for the second time in succession, once for each slice. fields: from
        `finish`.
        """
        return [
            f"evaluation: {one['by']} {one['value']} is solved in {one['accuracy']:.1%} of {one['answers']} answers, "
            f"all others in {one['rest_accuracy']:.1%} (p {one['p_corrected']:.2g})"
            for one in self._take(fields["slices"])
        ]

    def restore(self, rows: Iterable[Mapping[str, Any]], last_version: int) -> None:
        """Continue after earlier sessions. rows: of kind `slices`, in the order of metrics.jsonl."""
        for row in rows:
            version, found = row.get("version"), row.get("slices")
            if isinstance(version, int) and version <= last_version and isinstance(found, list):
                self._take([one for one in found if isinstance(one, dict) and {"by", "value", "is_weak"} <= one.keys()])

    def _take(self, found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The slices of an evaluation that are now named for the first time."""
        weak = {Slice(str(one["by"]), str(one["value"])): one for one in found if one["is_weak"]}
        new = [key for key in weak if key in self._weak_before and key not in self._named and key.by != ANSWER_LENGTH]
        self._weak_before = set(weak)
        self._named.update(new)
        return [weak[key] for key in new]

    def _members(self, numbers: np.ndarray, row_N: np.ndarray, lengths: Mapping[int, int]) -> dict[Slice, np.ndarray]:
        """Which answers belong to each slice."""
        assert self._slices is not None
        places: dict[Slice, list[int]] = {}
        for place, row in enumerate(row_N):
            for one in self._slices[int(row)]:
                places.setdefault(one, []).append(place)
        if self._has_answer_length:
            for place, name in enumerate(quarters([lengths.get(int(number), 0) for number in numbers])):
                places.setdefault(Slice(ANSWER_LENGTH, name), []).append(place)
        members = {}
        for one in sorted(places, key=_place):
            members[one] = np.zeros(len(numbers), dtype=bool)
            members[one][places[one]] = True
        return members

    def _clusters(
        self, numbers: np.ndarray, is_solved: np.ndarray, wrong: Mapping[int, str], ends: Mapping[int, str]
    ) -> list[dict[str, Any]]:
        """Groups of wrong answers, with examples. A row is solved if at least half of its answers are."""
        solved: dict[int, list[bool]] = {}
        for number, one in zip(numbers, is_solved, strict=True):
            solved.setdefault(int(number) // self._num_samples, []).append(bool(one))
        rows = list(solved)
        prompts = [prompt_text(self._row_of(row * self._num_samples)) for row in rows]
        phrases = by_phrase(prompts, np.array([2 * sum(solved[row]) >= len(solved[row]) for row in rows]))
        forms = {number: form_of(end, str(self._row_of(number).get("answer", ""))) for number, end in ends.items()}
        found = []
        for cluster in (*by_form(forms), *phrases):
            members = cluster.members
            if cluster.kind == "phrase":
                members = tuple(
                    number
                    for place in cluster.members
                    for number in range(rows[place] * self._num_samples, (rows[place] + 1) * self._num_samples)
                )
            examples = self._examples_of([number for number in members if number in wrong], wrong)
            found.append(
                {
                    "kind": cluster.kind, "name": cluster.name, "wrong": cluster.wrong, "solved": cluster.solved,
                    "p_corrected": cluster.p_corrected, "examples": examples,
                }
            )  # fmt: skip
        return found

    def _examples(self, is_member: np.ndarray, numbers: np.ndarray, wrong: Mapping[int, str]) -> list[dict[str, Any]]:
        """The first rows of a slice with a wrong answer."""
        return self._examples_of([int(number) for number in numbers[is_member] if int(number) in wrong], wrong)

    def _examples_of(self, numbers: Sequence[int], wrong: Mapping[int, str]) -> list[dict[str, Any]]:
        """The first of these wrong answers."""
        return [
            {
                "row": number // self._num_samples, "prompt": _short(prompt_text(row := self._row_of(number))),
                "answer": wrong[number], "expected": _short(str(row.get("answer", ""))),
            }
            for number in numbers[:MAX_EXAMPLES]
        ]  # fmt: skip


def _place(one: Slice) -> tuple[str, float]:
    """By property, and of one property by the number with which the value begins."""
    number = re.match(r"-?\d+(?:\.\d+)?", one.value)
    return one.by, float(number[0]) if number else math.inf


def _fields(one: Slice, result: SliceResult, examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "by": one.by, "value": one.value, "rows": result.num_rows,
        "answers": int(result.share.answers), "solved": int(result.share.solved),
        "accuracy": result.share.value, "low": result.interval[0], "high": result.interval[1],
        "rest_answers": int(result.rest.answers), "rest_accuracy": result.rest.value,
        "difference": result.difference, "difference_low": result.difference_interval[0],
        "difference_high": result.difference_interval[1],
        "p": result.p, "p_corrected": result.p_corrected, "is_weak": result.is_weak,
        **({"examples": examples} if examples else {}),
    }  # fmt: skip


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ..."
