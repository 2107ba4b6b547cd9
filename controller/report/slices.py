"""Slices of evaluations in the report: the table of the newest one, weak slices, and slices that became worse.

The results are in metrics.jsonl, in rows of kind `slices` (telemetry/slice_recorder.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from areal_like.plain_text import one_line, printable
from controller.data.eval_slices import ANSWER_LENGTH
from controller.data.slice_statistics import ALPHA, MIN_ANSWERS, MIN_DIFFERENCE, Share, fisher, holm
from controller.report.data import Row, RunData, number
from controller.report.finding import Finding, Rated, Weight, plural, sentences

MAX_NAMED = 3
"""Slices in the title of a finding."""
_NEEDED = ("accuracy", "rest_accuracy", "answers", "rest_answers", "rows")


class Example(NamedTuple):
    """A wrong answer."""

    row: str
    prompt: str
    answer: str
    expected: str


class Line(NamedTuple):
    """A slice in the table."""

    name: str
    rows: str
    accuracy: str
    interval: str
    difference: str
    significance: str
    change: str
    is_weak: bool
    examples: Sequence[Example]


class ClusterLine(NamedTuple):
    """A group of wrong answers in the report."""

    name: str
    counts: str
    examples: Sequence[Example]


class Fall(NamedTuple):
    """A slice that is solved less often than at an earlier version."""

    name: str
    before: float
    after: float
    version: int
    """The earlier version."""
    p_corrected: float
    of_rest: float
    """Change of all other answers."""


def find(data: RunData) -> list[Rated]:
    """Findings about slices of the newest evaluation. An answer's length is a result and not a property of a row, so
    its slices are only in the table.
    """
    if not data.slices:
        return []
    newest = data.slices[-1]
    found = []
    if weak := [one for one in slices_of(newest) if one["is_weak"] and one["by"] != ANSWER_LENGTH]:
        weak.sort(key=lambda one: number(one, "difference"))
        words = [
            f"{_name(one)} is solved in {_percent(number(one, 'accuracy'))} of "
            f"{plural(int(one['answers']), 'answer')}, all others in {_percent(number(one, 'rest_accuracy'))}"
            for one in weak[:MAX_NAMED]
        ]
        title = f"The model is weak in {plural(len(weak), 'slice')} of the evaluation: {'; '.join(words)}"
        detail = f"Version {newest['version']}. Each p-value is below {ALPHA:g}, after the correction for all slices"
        advice = (
            "Read the examples in the report, and check the labels and the scorer of these rows. Add such rows to "
            "data.train, or raise their ratio in data.mix"
        )
        finding = Finding("slice_weak", "warning", title, sentences(detail), advice)
        found.append(Rated(Weight.SIGNAL, finding, abs(number(weak[0], "difference"))))
    if fallen := falls(data.slices):
        words = [
            f"{one.name}, from {_percent(one.before)} (version {one.version}) to {_percent(one.after)}"
            for one in fallen[:MAX_NAMED]
        ]
        detail = f"The accuracy of all other answers changed by {100 * fallen[0].of_rest:+.1f} percentage points"
        finding = Finding(
            "slice_worse",
            "warning",
            f"The accuracy fell in {plural(len(fallen), 'slice')} of the evaluation: {'; '.join(words)}",
            sentences(detail),
            "Compare the answers of both versions; add such rows to data.train, or keep the earlier checkpoint",
        )
        found.append(Rated(Weight.SIGNAL, finding, fallen[0].before - fallen[0].after))
    return found


def falls(evaluations: Sequence[Row]) -> list[Fall]:
    """Slices of the newest evaluation that are solved less often than at their best earlier version, by more than
    chance and by more than all other answers; the largest fall first. Only evaluations of the same rows are compared.

    The p-value is the larger one of Fisher's test between the versions and of the test against the change of the rest.
    It is multiplied by the number of earlier evaluations, among which the best was chosen, and corrected for the number
    of slices.
    """
    newest = evaluations[-1]
    earlier = _of_same_rows(evaluations)[:-1]
    if not earlier:
        return []
    candidates, p_values = [], []
    for one in slices_of(newest):
        before = [(row, same) for row in earlier if (same := _same(row, one)) is not None]
        if not before or one["by"] == ANSWER_LENGTH:
            continue
        row, best = max(before, key=lambda pair: number(pair[1], "accuracy"))
        now, then = _share(newest, one), _share(row, best)
        if min(now.answers, then.answers) < MIN_ANSWERS:
            continue
        candidates.append((one, best, row))
        p_values.append(min(1.0, max(fisher(now, then), _p_of_excess(newest, one, row, best)) * len(before)))
    found = []
    for (one, best, row), p in zip(candidates, holm(p_values), strict=True):
        change = number(one, "accuracy") - number(best, "accuracy")
        of_rest = number(one, "rest_accuracy") - number(best, "rest_accuracy")
        if p < ALPHA and change <= -MIN_DIFFERENCE and change - of_rest <= -MIN_DIFFERENCE:
            found.append(
                Fall(_name(one), number(best, "accuracy"), number(one, "accuracy"), int(row["version"]), p, of_rest)
            )
    return sorted(found, key=lambda fall: fall.after - fall.before)


def table(evaluations: Sequence[Row]) -> list[Line]:
    """Lines of the newest evaluation, weak slices first, then in the order of the record."""
    if not evaluations:
        return []
    newest, first = evaluations[-1], _of_same_rows(evaluations)[0]
    lines = []
    for one in slices_of(newest):
        before = _same(first, one) if first is not newest else None
        p = one.get("p_corrected")
        lines.append(
            Line(
                name=_name(one),
                rows=f"{int(one['rows']):,}",
                accuracy=_percent(number(one, "accuracy")),
                interval=f"{_percent(number(one, 'low'))} to {_percent(number(one, 'high'))}",
                difference=f"{100 * number(one, 'difference'):+.1f} ({100 * number(one, 'difference_low'):+.1f} to "
                f"{100 * number(one, 'difference_high'):+.1f})",
                significance="too few" if not isinstance(p, int | float) else f"{p:.2g}",
                change=""
                if before is None
                else f"{100 * (number(one, 'accuracy') - number(before, 'accuracy')):+.1f} since version "
                f"{first['version']}",
                is_weak=bool(one["is_weak"]),
                examples=_examples(one),
            )
        )
    return sorted(lines, key=lambda line: not line.is_weak)


def clusters(row: Row) -> list[ClusterLine]:
    """Groups of wrong answers of one evaluation."""
    found = row.get("clusters")
    lines = []
    for one in found if isinstance(found, list) else []:
        if not isinstance(one, dict) or not math.isfinite(number(one, "wrong")):
            continue
        wrong, solved, name = int(one["wrong"]), int(number(one, "solved", 0.0)), printable(str(one.get("name", "")))
        if one.get("kind") == "phrase":
            name = f'prompt with "{name}"'
            counts = f"{plural(wrong, 'row')} wrong, {solved} solved (p {number(one, 'p_corrected'):.2g})"
        else:
            name, counts = f"answer: {name}", f"{plural(wrong, 'answer')} wrong"
        lines.append(ClusterLine(one_line(name), counts, _examples(one)))
    return lines


def as_text(row: Row) -> str:
    """The table of one evaluation for a terminal, with examples of weak slices and groups of wrong answers."""
    lines = table([row])
    text = _slices_text(lines) if lines else "no property of the rows divides the evaluation into slices\n"
    if groups := clusters(row):
        text += "\nGroups of wrong answers:\n"
    for group in groups:
        text += f"\n{group.name}: {group.counts}\n"
        text += "".join(
            f"  row {example.row}\n    prompt:   {_excerpt(example.prompt)}\n"
            f"    answer:   {_excerpt(example.answer)}\n    expected: {_excerpt(example.expected)}\n"
            for example in group.examples
        )
    return text


def _slices_text(lines: Sequence[Line]) -> str:
    cells = [("slice", "rows", "accuracy", "95 % interval", "to the rest", "p")]
    cells += [
        (f"{'! ' if one.is_weak else ''}{one.name}", one.rows, one.accuracy, one.interval, one.difference,
         one.significance)
        for one in lines
    ]  # fmt: skip
    text = _aligned(cells)
    weak = [one for one in lines if one.is_weak]
    text += (
        f"\nA slice with ! is solved less often than the rest (p below {ALPHA:g} after Holm's correction, and at least "
        f"{100 * MIN_DIFFERENCE:g} points).\n"
        if weak
        else "\nNo slice is solved less often than the rest by more than chance.\n"
    )
    for one in weak:
        text += "".join(
            f"\n{one.name}, row {example.row}\n  prompt:   {_excerpt(example.prompt)}\n"
            f"  answer:   {_excerpt(example.answer)}\n  expected: {_excerpt(example.expected)}\n"
            for example in one.examples
        )
    return text


def slices_of(row: Row) -> list[dict[str, Any]]:
    """The slices of a row of metrics.jsonl; those with missing parts are left out."""
    found = row.get("slices")
    known = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [
        one
        for one in known
        if isinstance(one.get("by"), str)
        and isinstance(one.get("value"), str)
        and "is_weak" in one
        and all(
            number(one, key) == number(one, key)
            for key in ("accuracy", "rest_accuracy", "answers", "rest_answers", "rows")
        )
    ]


def _examples(one: Mapping[str, Any]) -> list[Example]:
    found = one.get("examples")
    known = [example for example in found if isinstance(example, Mapping)] if isinstance(found, list) else []
    return [Example(*(printable(str(example.get(name, ""))) for name in Example._fields)) for example in known]


def _of_same_rows(evaluations: Sequence[Row]) -> list[Row]:
    """The evaluations with as many rows as the newest one: a periodic evaluation uses the first rows of a final one.
    Of a record without this number, those of the same kind.
    """
    newest = evaluations[-1]
    key = "num_rows" if "num_rows" in newest else "eval"
    return [row for row in evaluations if row.get(key) == newest.get(key)]


def _same(row: Row, one: Mapping[str, Any]) -> dict[str, Any] | None:
    return next((other for other in slices_of(row) if (other["by"], other["value"]) == (one["by"], one["value"])), None)


def _share(row: Row, one: Mapping[str, Any]) -> Share:
    return Share(number(one, "solved"), number(one, "answers")).without_repeats(number(row, "design_effect", 1.0))


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first one aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def _p_of_excess(row: Row, one: Mapping[str, Any], row_before: Row, before: Mapping[str, Any]) -> float:
    """Two-sided p-value of the slice's change in addition to that of all other answers, by the normal approximation."""
    change = number(one, "accuracy") - number(before, "accuracy")
    of_rest = number(one, "rest_accuracy") - number(before, "rest_accuracy")
    variance = 0.0
    for at, part in ((row, one), (row_before, before)):
        effect = number(at, "design_effect", 1.0)
        for name, count in (("accuracy", "answers"), ("rest_accuracy", "rest_answers")):
            # One solved and one wrong answer more, so that a share of 0 or 1 has a variance.
            n = number(part, count) / effect + 2
            share = (number(part, name) * (n - 2) + 1) / n
            variance += share * (1 - share) / n
    return math.erfc(abs(change - of_rest) / math.sqrt(2 * variance))


def _name(one: Mapping[str, Any]) -> str:
    return one_line(f"{one['by']} {one['value']}")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _excerpt(value: str) -> str:
    text = one_line(" ".join(value.split()))
    return text if len(text) <= 100 else f"{text[:97]}..."
