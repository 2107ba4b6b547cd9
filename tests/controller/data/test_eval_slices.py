"""Which slices rows belong to, and names that no row has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import UserError
from controller.data.eval_layout import EvalLayout, SetSize
from controller.data.eval_slices import LOOKED_AT, Slice, labels_of, problems_of, quarters, slices_of_rows
from controller.data.table import JoinedTable


def rows_of(rows: list[dict[str, Any]], *, num_samples: int = 1, wheres: list[str] | None = None) -> Any:
    layout = EvalLayout({"": SetSize(len(rows), len(rows), len(rows))}, num_samples=num_samples)
    places = wheres or [f"eval.jsonl:{place + 1}" for place in range(len(rows))]
    table = SimpleNamespace(where=lambda index: places[index])
    return SimpleNamespace(layout=layout, eval_table=table, eval=lambda number: rows[layout.table_row(number)])


class Rows(list[dict[str, Any]]):
    """A table of these rows."""


def no_library() -> None:
    raise UserError("the package py3langid is not installed", remedy="pip install 'areal-like[data]'")


def test_auto_takes_lengths_and_every_column_of_few_values():
    rows = [
        {"prompt": "x" * (place + 1), "answer": str(place), "topic": "ab"[place % 2], "id": place,
         "text": f"unique {place}" * 9, "constant": 1, "nested": {"a": 1}, "score": place / 10}
        for place in range(40)
    ]  # fmt: skip
    found = slices_of_rows(rows_of(rows), ["auto"])
    assert {one.by for row in found for one in row} == {"prompt_length", "topic", "score"}
    assert found[0] == (Slice("prompt_length", "1-10"), Slice("topic", "a"), Slice("score", "0-0.9"))
    assert found[39] == (Slice("prompt_length", "31-40"), Slice("topic", "b"), Slice("score", "3-3.9"))


def test_sources_are_files_and_languages_are_those_of_prompts():
    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("hallo", "hello", "", "hallo")]
    places = ["a.jsonl:1", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]
    language = {"hallo": "de", "hello": "en", "": ""}.__getitem__
    found = slices_of_rows(rows_of(rows, wheres=places), ["source", "language"], language)
    assert found == [
        (Slice("source", "a.jsonl"), Slice("language", "de")),
        (Slice("source", "b.jsonl"), Slice("language", "en")),
        (Slice("source", "b.jsonl"), Slice("language", "(unknown)")),
        (Slice("source", "b.jsonl"), Slice("language", "de")),
    ]


def test_a_row_with_several_answers_has_one_entry():
    rows = [{"prompt": "a", "topic": "x"}, {"prompt": "b", "topic": "y"}]
    assert len(slices_of_rows(rows_of(rows, num_samples=4), ["topic"])) == 2


def test_rare_values_share_a_slice_and_missing_ones_have_their_own():
    labels = labels_of([*["often"] * 5, None, *range(30)])
    assert labels[:6] == ["often"] * 5 + ["(none)"]
    assert len(set(labels)) == 20
    assert labels.count("(others)") == 13
    assert labels_of([0.1 * n for n in range(20)] + [None])[-1] == "(none)"


def test_equal_numbers_are_never_in_two_quarters():
    names = quarters([1.0] * 9 + [2.0, 3.0])
    assert len({name for name in names[:9]}) == 1
    assert names[9:] == ["2-3", "2-3"]


def test_different_quarters_have_different_names():
    stamps = [1_700_000_000 + place for place in range(40)]
    assert len(set(labels_of(stamps))) == 4
    assert labels_of(stamps)[0] == "1700000000-1700000009"
    close = [1.0 + place * 1e-12 for place in range(40)]
    assert len(set(labels_of(close))) == 4


def test_nan_is_no_value_and_large_integers_are_numbers():
    labels = labels_of([math.nan, math.inf, *(10**400 + place for place in range(20)), *range(20)])
    assert labels[:2] == ["(none)", "(none)"]
    assert len(set(labels)) == 4
    assert labels_of([math.nan, "a"]) == ["(none)", "a"]
    rows = [{"prompt": "p", "level": "ab"[place % 2] if place % 3 else math.nan} for place in range(60)]
    assert {row[0].value for row in slices_of_rows(rows_of(rows), ["auto"])} == {"a", "b", "(none)"}


def test_a_column_of_a_later_set_is_known():
    first: Any = Rows([{"prompt": "a"}] * (LOOKED_AT + 1))
    second: Any = Rows([{"prompt": "b", "level": 1}])
    joined = JoinedTable.__new__(JoinedTable)
    joined.parts = (first, second)
    assert list(problems_of(["level"], joined, no_library)) == []
    assert len(list(problems_of(["levle"], joined, no_library))) == 1


def test_an_unknown_column_is_a_problem_with_the_nearest_name():
    table: Any = Rows([{"prompt": "a", "topic": {"name": "x"}}])
    assert list(problems_of(["auto", "topic.name", "source"], table, no_library)) == []
    (problem,) = problems_of(["topc"], table, no_library)
    assert (problem.keys, problem.what) == (("eval.slices",), "the evaluation rows have no column `topc`")
    assert "topic" in problem.remedy
    (problem,) = problems_of(["language"], table, no_library)
    assert problem.what == "`language`: the package py3langid is not installed"
    assert list(problems_of(["topc"], None, no_library)) == []


@pytest.mark.parametrize("name", ["prompt_length", "answer_length"])
def test_built_in_names_need_no_column(name):
    table: Any = Rows([{"prompt": "a"}])
    assert list(problems_of([name], table, no_library)) == []
