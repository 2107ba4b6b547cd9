"""Divides the rows of an evaluation into slices: by columns, prompt length, source and language.

Statistics are in slice_statistics.py; answers are collected in telemetry/slice_recorder.py. The slices of rows are made
once per run, so that they are the same at every version.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_like.errors import UserError
from areal_like.prompts import CHAT_COLUMN, prompt_text
from areal_like.red_team import RED_TEAM_COLUMN
from controller.config.problems import Problem, nearest
from controller.data.job_rows import JobRows
from controller.data.table import JoinedTable, Table

AUTO = "auto"
"""Stands for prompt and answer length, sources, and every column that divides the rows into few slices."""
PROMPT_LENGTH, ANSWER_LENGTH, SOURCE, LANGUAGE = "prompt_length", "answer_length", "source", "language"
BUILT_IN = (AUTO, PROMPT_LENGTH, ANSWER_LENGTH, SOURCE, LANGUAGE)
KEY = "eval.slices"
NO_VALUE, OTHERS, UNKNOWN = "(none)", "(others)", "(unknown)"
MAX_VALUES = 20
"""Maximum slices of a column; its rarest values share one."""
MAX_NUMBERS = 10
"""A numeric column with more values is divided into quarters."""
MAX_VALUE_CHARS = 60
LOOKED_AT = 1_000
"""Rows of each set in which a column is looked for."""
_NOT_SLICED = frozenset({"prompt", "messages", "answer", "solution", "id", CHAT_COLUMN, RED_TEAM_COLUMN})
"""Columns that `auto` leaves out."""

Language = Callable[[str], str]
"""Code of the language of a text; empty if it is not known."""


class Slice(NamedTuple):
    """Rows with the same value of a property."""

    by: str
    value: str


def slices_of_rows(rows: JobRows, names: Sequence[str], language: Language | None = None) -> list[tuple[Slice, ...]]:
    """The slices of each row of the evaluation, in the order in which rows are numbered (`eval_layout`).

    Args:
        rows: data of the job, with evaluation rows.
        names: `eval.slices`.
        language: needed if `names` has `language`.
    """
    numbers = range(0, rows.layout.num_final, rows.layout.num_samples)
    fields = [rows.eval(number) for number in numbers]
    properties: dict[str, Sequence[Any]] = {}
    for name in names:
        if name == AUTO:
            chosen = {PROMPT_LENGTH: _prompt_lengths(fields), SOURCE: _sources(rows, numbers), **_columns(fields)}
            properties = {**chosen, **properties}
        elif name == PROMPT_LENGTH:
            properties[name] = _prompt_lengths(fields)
        elif name == SOURCE:
            properties[name] = _sources(rows, numbers)
        elif name == LANGUAGE:
            assert language is not None, "the check before the run has found the library"
            properties[name] = [language(prompt_text(row)) or UNKNOWN for row in fields]
        elif name != ANSWER_LENGTH:
            properties[name] = [_nested(row, name) for row in fields]
    labels = {name: labels_of(values) for name, values in properties.items()}
    kept = {name: found for name, found in labels.items() if len(set(found)) > 1}
    return [tuple(Slice(name, kept[name][place]) for name in kept) for place in range(len(fields))]


def labels_of(values: Sequence[Any]) -> list[str]:
    """The slice of each value: the value as text, or the range of its quarter if it is one of many numbers. NaN and
    infinite numbers are no values.
    """
    values = [_without_nan(value) for value in values]
    known = [value for value in values if value is not None]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    if known and are_numbers and len(set(known)) > MAX_NUMBERS:
        ranges = iter(quarters([_as_float(value) for value in known]))
        return [NO_VALUE if value is None else next(ranges) for value in values]
    texts = [NO_VALUE if value is None else _as_text(value) for value in values]
    frequent = [text for text, _ in Counter(texts).most_common(MAX_VALUES + 1)]
    if len(frequent) <= MAX_VALUES:
        return texts
    named = set(frequent[: MAX_VALUES - 1])
    return [text if text in named else OTHERS for text in texts]


def quarters(values: Sequence[float]) -> list[str]:
    """The range of each value's quarter, from the smallest to the largest value in it. Equal values share a quarter.

    Example:
        >>> quarters([1, 2, 3, 4, 10, 10, 10, 10])
        ['1-2', '1-2', '3-4', '3-4', '10', '10', '10', '10']
    """
    found = np.asarray(values, dtype=np.float64)
    bounds = np.unique(np.quantile(found, (0.25, 0.5, 0.75), method="lower"))
    places = np.searchsorted(bounds, found, side="left")
    ranges = {place: (found[places == place].min(), found[places == place].max()) for place in np.unique(places)}
    numbers = {number for pair in ranges.values() for number in pair}
    # Enough digits for different numbers to have different texts; 17 are enough for any two.
    digits = next(
        digits for digits in (6, 10, 17) if len({f"{number:.{digits}g}" for number in numbers}) == len(numbers)
    )
    names = {
        place: f"{low:.{digits}g}" if low == high else f"{low:.{digits}g}-{high:.{digits}g}"
        for place, (low, high) in ranges.items()
    }
    return [names[place] for place in places]


def problems_of(names: Sequence[str], table: Table | None, find_library: Callable[[], None]) -> Iterator[Problem]:
    """Problems of `eval.slices`: columns that no row has, and a missing library.

    Args:
        names: `eval.slices`.
        table: the evaluation rows; None: they cannot be read.
        find_library: raises UserError if languages cannot be detected.
    """
    if LANGUAGE in names:
        try:
            find_library()
        except UserError as error:
            yield Problem((KEY,), f"`{LANGUAGE}`: {error.what}", error.remedy)
    if table is None:
        return
    parts = table.parts if isinstance(table, JoinedTable) else (table,)
    rows = [part[place] for part in parts for place in range(min(len(part), LOOKED_AT))]
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in (CHAT_COLUMN, RED_TEAM_COLUMN)))
    for name in names:
        if name in BUILT_IN or any(_nested(row, name) is not None for row in rows):
            continue
        known = [*BUILT_IN, *columns]
        near = nearest(name, known, count=3) or known
        yield Problem((KEY,), f"the evaluation rows have no column `{name}`", f"use one of {', '.join(near)}")


def _prompt_lengths(fields: Sequence[Mapping[str, Any]]) -> list[str]:
    return quarters([len(prompt_text(row)) for row in fields])


def _sources(rows: JobRows, numbers: range) -> list[str]:
    """The set of each row, and its file."""
    assert rows.eval_table is not None
    found = []
    for number in numbers:
        name = rows.layout[number].set_name
        file = rows.eval_table.where(rows.layout.table_row(number)).rpartition(":")[0]
        found.append(" ".join(part for part in (name, file) if part) or UNKNOWN)
    return found


def _columns(fields: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns whose values divide the rows into a few slices."""
    found = {}
    for name in dict.fromkeys(name for row in fields for name in row):
        values = [_without_nan(row.get(name)) for row in fields]
        if name in _NOT_SLICED or not all(isinstance(value, str | int | float | None) for value in values):
            continue
        are_numbers = all(isinstance(value, int | float | None) for value in values)
        is_short = all(len(str(value)) <= MAX_VALUE_CHARS for value in values)
        if is_short and (1 < len(set(values)) <= MAX_VALUES or are_numbers):
            found[name] = values
    return found


def _without_nan(value: Any) -> Any:
    """The value, or None for NaN and infinite numbers, with which some file formats write missing ones."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nested(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a nested one by its dotted path; None if the row has none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _as_float(value: float) -> float:
    """The value, or the largest float for an integer beyond it."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(sys.float_info.max, value > 0 or -1)


def _as_text(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
