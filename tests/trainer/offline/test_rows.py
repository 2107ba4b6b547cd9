"""Claims about the rows of files: TRL's formats are read, and an unusable row is named by file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_offline import write_rows

from areal_like.errors import UserError
from trainer.offline.rows import read_demonstrations, read_pairs

USER, ANSWER = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}


def test_the_three_formats_of_demonstrations_are_read(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1", "completion": "2"},
        {"messages": [USER, ANSWER], "other": 1},
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
    ]
    plain, whole, continued = read_demonstrations(Path(write_rows(tmp_path / "rows.jsonl", rows)))
    assert plain.fields == {"prompt": "1", "response": "2"}
    assert plain.where == f"{tmp_path / 'rows.jsonl'}:1"
    assert whole.fields == {"messages": [USER, ANSWER]}
    assert whole.num_given == 0
    assert continued.fields == {"messages": [USER, ANSWER, USER, ANSWER]}
    assert continued.num_given == 3


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "2"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def test_calls_and_tools_are_read(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]},
        {"prompt": [USER], "completion": [CALL], "tools": '[{"name": "f"}]'},
        {"prompt": "1", "completion": "2", "tools": "any"},
    ]
    whole, continued, plain = read_demonstrations(Path(write_rows(tmp_path / "rows.jsonl", rows)))
    assert whole.fields == {"messages": [USER, {**CALL, "content": ""}, RESULT, ANSWER], "tools": [TOOL]}
    assert continued.fields == {"messages": [USER, {**CALL, "content": ""}], "tools": [{"name": "f"}]}
    assert plain.fields == {"prompt": "1", "response": "2"}
    pairs = [{"prompt": [USER], "chosen": [CALL], "rejected": [ANSWER], "tools": [TOOL]}]
    (pair,) = read_pairs(Path(write_rows(tmp_path / "pairs.jsonl", pairs)))
    assert [one.fields["tools"] for one in (pair.chosen, pair.rejected)] == [[TOOL], [TOOL]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1"}, "has no `completion`"),
        ({"messages": [USER, {**CALL, "tool_calls": [3]}]}, "`tool_calls` must be a list"),
        ({"messages": [USER, {**CALL, "tool_calls": [{}]}]}, "call 1 of `tool_calls`"),
        ({"messages": [USER, {**CALL, "tool_calls": []}]}, "`messages` is not a list"),
        ({"messages": [USER, CALL], "tools": "f"}, "`tools` must be a list"),
        ({"completion": "1"}, "has no `prompt`"),
        ({"prompt": "1", "completion": None}, "has no `completion`"),
        ({"prompt": "1", "completion": ""}, "`completion` is empty"),
        ({"prompt": "1", "completion": [ANSWER]}, "of different types"),
        ({"prompt": [USER], "completion": "2"}, "of different types"),
        ({"prompt": [USER], "completion": [USER]}, "does not end with an assistant message"),
        ({"prompt": [USER], "completion": []}, "`completion` is not a list"),
        ({"prompt": [{"role": "user"}], "completion": [ANSWER]}, "`prompt` is not a list"),
        ({"messages": [USER]}, "does not end with an assistant message"),
        ({"messages": "text"}, "`messages` is not a list"),
        ({"text": "1"}, "has no `prompt`"),
        ([1], "is not a JSON object"),
    ],
)
def test_a_row_that_cannot_be_imitated_is_named_by_file_and_line(row: Any, words: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "completion": "2"}, row])
    with pytest.raises(UserError, match=words) as refused:
        read_demonstrations(Path(file))
    assert refused.value.where == f"{file}:2"
    assert refused.value.remedy


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(
        UserError, match=r"rows.jsonl: the file contains no rows -> use rows of the form \{prompt, completion\}"
    ):
        read_demonstrations(tmp_path / "rows.jsonl")


def test_a_line_separator_within_a_text_does_not_end_the_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1\u2028", "completion": "2"}\r\n', newline="")
    assert read_demonstrations(tmp_path / "rows.jsonl")[0].fields["prompt"] == "1\u2028"


def test_the_formats_of_preferences_are_read(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "3"}
    rows = [
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
    ]
    plain, chat, whole = read_pairs(Path(write_rows(tmp_path / "rows.jsonl", rows)))
    assert (plain.chosen.fields["response"], plain.rejected.fields["response"]) == ("2", "3")
    assert plain.where == f"{tmp_path / 'rows.jsonl'}:1"
    for pair in (chat, whole):
        assert pair.chosen.fields == {"messages": [USER, ANSWER]}
        assert pair.rejected.fields == {"messages": [USER, other]}
        assert pair.chosen.num_given == pair.rejected.num_given == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1", "chosen": "2"}, "has no `rejected`"),
        ({"prompt": "1", "rejected": "2"}, "has no `chosen`"),
        ({"chosen": "1", "rejected": "2"}, "has no `prompt`"),
        ({"prompt": "1", "chosen": "2", "rejected": "2"}, "`chosen` and `rejected` are equal"),
        ({"prompt": "1", "chosen": "2", "rejected": ""}, "`rejected` is empty"),
        ({"prompt": "1", "chosen": "2", "rejected": [ANSWER]}, "`prompt` and `rejected` are of different types"),
        ({"chosen": [ANSWER], "rejected": [USER, ANSWER]}, "no message in common"),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "`rejected` is not a list of"),
    ],
)
def test_a_preference_that_cannot_be_used_is_named_by_file_and_line(row: Any, words: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3"}, row])
    with pytest.raises(UserError, match=words) as refused:
        read_pairs(Path(file))
    assert refused.value.where == f"{file}:2"
    assert refused.value.remedy
