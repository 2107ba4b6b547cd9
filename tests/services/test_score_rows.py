"""Lines of a file as rows to score: every line is a row, and a bad one says why it cannot be scored."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from services.reward import score_rows
from services.reward.score_rows import Row, num_lines, only_gold, rows_of


def rows(content: bytes, kind: str = "math") -> list[Row]:
    return list(rows_of(io.BytesIO(content), kind))


def row(kind: str = "math", **fields: Any) -> Row:
    (made,) = rows(json.dumps(fields).encode() + b"\n", kind)
    return made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "empty"),
        (b"  \t", "empty"),
        (b'{"response": "7", "gold": ', "not JSON"),
        (b'{"response": "7"} {"response": "8"}', "not JSON"),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b"7", "must be a JSON object, not a number"),
        (b"null", "must be a JSON object, not null"),
        (b'"response"', "must be a JSON object, not a text"),
        (b'{"response": "\xff\xfe"}', "not UTF-8 (byte 15"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"gold": "7"}', "`response` is missing"),
        (b'{"response": null}', "`response` is missing"),
        (b'{"response": 7}', "`response` must be text, not a number"),
        (b'{"response": ["7"]}', "`response` must be text, not a list"),
        (b'{"response": {"text": "7"}}', "`response` must be text, not an object"),
    ],
)
def test_a_bad_line_is_a_row_that_says_why_and_the_next_one_is_read(line: bytes, words: str) -> None:
    bad, good = rows(line + b'\n{"response": "7", "gold": "7"}\n')
    assert words in bad.refusal
    assert (bad.number, good.number, good.refusal, good.response) == (1, 2, "", "7")


def test_id_is_the_rows_own_else_the_number_of_its_line() -> None:
    assert row(id="a", response="7").id == "a"
    assert row(id=0, response="7").id == 0
    assert row(id={"set": 1}, response="7").id == {"set": 1}
    assert row(id=12345678901234567890, response="7").id == 12345678901234567890
    assert row(id=None, response="7").id == row(response="7").id == 1
    assert rows(b'{"id": "u", "response": "\xff"}\n')[0].id == "u"
    assert rows(b'{"id": "u"}\n')[0].id == "u"


def test_lines_may_end_as_they_like() -> None:
    content = b'\xef\xbb\xbf{"response": "1"}\r\n{"response": "2"}\n\n{"response": "3"}'
    found = rows(content)
    assert [(one.number, one.response) for one in found] == [(1, "1"), (2, "2"), (3, ""), (4, "3")]
    assert rows(b'{"response": "3"}')[0].digest == rows(b'{"response": "3"}\r\n')[0].digest
    assert rows(b"") == []


@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"a\nb", b"a\n\n\nb\n"])
def test_lines_are_counted_as_they_are_read(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_bytes(content)
    assert num_lines(file) == len(rows(content))


def test_a_line_that_is_too_long_is_passed_over_and_no_text_of_any_length_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score_rows, "MAX_LINE_BYTES", 64)
    monkeypatch.setattr(score_rows, "MAX_TEXT_CHARS", 10)
    long, short, texts = rows(b"x" * 5_000_000 + b'\n{"response": "2"}\n{"id": 4, "response": "' + b"9" * 11 + b'"}')
    assert "longer than" in long.refusal
    assert (short.number, short.response) == (2, "2")
    assert (texts.id, texts.refusal) == (4, "`response` has 11 characters, but at most 10 are allowed")


def test_numbers_that_python_or_the_wire_cannot_hold_are_no_obstacle() -> None:
    assert only_gold(row(response="7", gold=10**30).columns) == {"gold": "1" + "0" * 30}
    long = rows(b'{"response": "7", "gold": ' + b"9" * 5000 + b"}")[0]
    assert only_gold(long.columns) == {"gold": "9" * 5000}


def test_a_gold_answer_is_text_or_a_number() -> None:
    assert only_gold({"gold": "7", "answer": "8"}) == {"gold": "7"}
    assert only_gold({"gold": 7}) == {"gold": "7"}
    assert only_gold({"gold": 0.5}) == {"gold": "0.5"}
    assert [only_gold({"gold": bad}) for bad in (None, True, [7], {"a": 7})] == [{}, {}, {}, {}]
    assert only_gold({"gold": "7\ud800"})["gold"].startswith("7")


def test_a_code_row_is_its_program_its_tests_and_its_limits() -> None:
    fields = {"program": "x = 1", "tests": ["assert x"], "time_limit_s": 2, "memory_limit_mb": 64}
    made = row("code", **fields, response="y = 1", note={"x": 10**30})
    assert (made.columns, made.response) == (fields, "")
    taken = row("code", response="```python\nx = 1\n```", tests=["assert x"])
    assert (taken.columns, taken.response) == ({"tests": ["assert x"]}, "```python\nx = 1\n```")
    assert row("code", tests=["assert x"]).refusal == "`program` is missing"
    assert row("code", **fields, test_imports="of another kind").columns == fields
    assert row("code", program="x = '\ud800'").columns["program"] == "x = '\0'"
    assert row("code", program=3).refusal == "`program` must be text, not a number"


def test_a_function_sees_the_whole_row_and_what_is_known_of_the_answer() -> None:
    made = row("mine:score", response="7", rubric=[1], finish_reason="length", num_tokens=9)
    assert made.columns["rubric"] == [1]
    assert (made.finish_reason, made.num_tokens) == ("length", 9)
    odd = row("mine:score", response="7\ud800", finish_reason=3, num_tokens=-1)
    assert (odd.finish_reason, odd.num_tokens, odd.response.encode()[:1]) == ("stop", 0, b"7")
    for given, taken in ((True, 0), (2.0, 0), ("3", 0), ((1 << 40) - 1, (1 << 40) - 1), (1 << 40, 0)):
        assert row("mine:score", response="7", num_tokens=given).num_tokens == taken


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_not_finite_are_refused_with_a_remedy(number: bytes) -> None:
    (row,) = rows(b'{"response": "7", "gold": ' + number + b"}")
    assert row.refusal.startswith(f"the line contains {number.decode()}")
    assert "write null" in row.refusal
