"""Which gold answers are tried, in which forms."""

from __future__ import annotations

import pytest

from controller.data.gold_answers import FORMS, MAX_CHARS, gold_answers


def written(text: str) -> list[str]:
    """The text in every form."""
    return [
        text, f"\\boxed{{{text}}}", f"#### {text}", f"#{text}", f"The answer is {text}.", f"<answer>{text}</answer>",
        f"```python\n{text}\n```",
    ]  # fmt: skip


def test_gold_answer_is_tried_in_every_form_and_before_other_columns() -> None:
    found = list(gold_answers([{"prompt": "1+1=", "answer": 2}]))
    assert found == [(0, "answer", text) for text in written("2")] + [(0, "prompt", text) for text in written("1+1=")]
    assert len(FORMS) == 7


def test_first_three_rows_and_four_other_columns_are_tried() -> None:
    row = {"a": "1", "b": "2", "answer": "3", "c": "4", "d": "5", "e": "6"}
    found = list(gold_answers([row] * 5))
    assert len(found) == 3 * 5 * 7
    assert [number for number, _, _ in found] == [0] * 35 + [1] * 35 + [2] * 35
    assert list(dict.fromkeys(column for _, column, _ in found)) == ["answer", "a", "b", "c", "d"]


@pytest.mark.parametrize("value", [True, False, None, "", "  ", [1], {"a": 1}, "x" * (MAX_CHARS + 1)])
def test_column_without_a_short_text_or_number_is_not_tried(value: object) -> None:
    assert list(gold_answers([{"answer": value, "x": value}])) == []


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.5, "1.5"), ("  7\n", "7"), ("x" * MAX_CHARS, "x" * MAX_CHARS)]
)
def test_numbers_and_texts_are_tried_without_white_space_around_them(value: object, text: str) -> None:
    assert list(gold_answers([{"answer": value}])) == [(0, "answer", one) for one in written(text)]


def test_gold_program_counts_as_the_answer_where_a_row_has_none() -> None:
    row = {"prompt": "p", "solution": "s", "code": "c", "canonical_solution": "k"}
    answers = [text for _, column, text in gold_answers([row]) if column == "answer"]
    assert answers == ["```python\nc\n```", "```python\nk\n```", "```python\ns\n```"]
    assert not [one for one in gold_answers([{**row, "answer": "4"}]) if one[1:] == ("answer", "```python\nc\n```")]


def test_braces_in_an_answer_are_text() -> None:
    assert [text for _, _, text in gold_answers([{"answer": "{x}"}])] == written("{x}")
