"""The file of verdicts as its own record: what is continued, what is repaired, what is refused and left as it was."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.verdict import Verdict
from services.reward.score_output import Totals, VerdictFile, verdict_line
from services.reward.score_rows import Row, rows_of

ROWS = b"".join(json.dumps({"id": f"r{number}", "response": str(number)}).encode() + b"\n" for number in range(5))
SCORER = "math@1"


def rows(content: bytes = ROWS) -> Iterator[Row]:
    return rows_of(io.BytesIO(content), "math")


def verdict_of(row: Row) -> Verdict:
    if row.number == 3:
        return Verdict(kind="timed_out", reason="math took longer than 10 s")
    return Verdict(kind="scored", value=float(row.number))


def written(path: Path, num_rows: int) -> bytes:
    content = b"".join(
        verdict_line(row, verdict_of(row), SCORER) for row, _ in zip(rows(), range(num_rows), strict=False)
    )
    path.write_bytes(content)
    return content


def gone_on(
    path: Path, scorer: str = SCORER, content: bytes = ROWS, overwrite: bool = False
) -> tuple[Totals, list[int]]:
    """What the file's verdicts add up to, and the rows that are left."""
    left = rows(content)
    with VerdictFile(path, overwrite=overwrite) as file:
        return file.resume(scorer, left), [row.number for row in left]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("num_rows", range(6))
def test_rows_with_a_verdict_are_counted_and_not_scored_again(path: Path, num_rows: int) -> None:
    before = written(path, num_rows)
    totals, left = gone_on(path)
    assert (totals.num_rows, left) == (num_rows, [1, 2, 3, 4, 5][num_rows:])
    assert totals.sum_value == sum({1, 2, 4, 5} & set(range(1, num_rows + 1)))
    assert totals.first_fault == ("line 3: math took longer than 10 s" if num_rows >= 3 else "")
    assert path.read_bytes() == before


def test_a_half_written_last_line_is_taken_off_wherever_it_was_cut(path: Path) -> None:
    before = written(path, 2)
    whole = before.split(b"\n")[1]
    for length in range(1, len(whole) + 1):
        path.write_bytes(before + whole[:length])
        totals, left = gone_on(path)
        assert (totals.num_rows, left, path.read_bytes()) == (2, [3, 4, 5], before)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ROWS.replace(b'"response": "1"', b'"response": "9"'), "line 2 does not match line 2 of the input"),
        (b"\n" + ROWS, "line 1 does not match"),
        (ROWS.split(b"\n")[0], "verdict for line 2, but the input has only 1"),
        (b"", "verdict for line 1, but the input has only 0"),
    ],
)
def test_a_changed_input_is_refused(path: Path, content: bytes, words: str) -> None:
    before = written(path, 3)
    with pytest.raises(UserError, match=words):
        gone_on(path, content=content)
    assert path.read_bytes() == before


def test_an_input_that_grew_is_gone_on_with(path: Path) -> None:
    written(path, 5)
    _, left = gone_on(path, content=ROWS + b'{"response": "new"}')
    assert left == [6]


def test_another_scorer_is_refused(path: Path) -> None:
    before = written(path, 3)
    with pytest.raises(UserError, match="line 1 was scored by math@1, but the current scorer is math@2") as caught:
        gone_on(path, "math@2")
    assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"a text of mine\n", b"a text of mine", b"{\"id\": 1}\n", b"[]\n", b"\n", b"\xff\xfe\n", b"\0\0\0",
        b"[" * 100_000 + b"\n",
        b'{"id": 1, "verdict": "scored", "value": null, "reason": "", "scorer": "math@1", "key": ""}\n',
        b'{"id": 1, "verdict": "scored", "value": NaN, "reason": "", "scorer": "math@1", "key": ""}\n',
        b'{"id": 1, "verdict": "fine", "value": 1.0, "reason": "", "scorer": "math@1", "key": ""}\n',
    ],
)  # fmt: skip
def test_a_file_that_holds_anything_else_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match="line 1 is not a verdict of this command"):
        gone_on(path)
    assert path.read_bytes() == content
    assert gone_on(path, overwrite=True) == (Totals(), [1, 2, 3, 4, 5])
    assert path.read_bytes() == b""


def test_one_process_writes_at_a_time(path: Path) -> None:
    with VerdictFile(path, overwrite=False) as first:
        with pytest.raises(UserError, match="another process is writing this file"):
            VerdictFile(path, overwrite=True)
        first.append(b"x\n")
    with VerdictFile(path, overwrite=False):
        assert path.read_bytes() == b"x\n"


def test_an_output_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No such file or directory.*create the folder first"):
        VerdictFile(tmp_path / "no" / "out", overwrite=False)
    with pytest.raises(UserError, match="directory"):
        VerdictFile(tmp_path, overwrite=False)


def test_a_verdict_line_is_plain_json_in_ascii() -> None:
    row = Row(number=7, id="\ud800é", digest="d")
    line = verdict_line(row, Verdict(kind="crashed", reason="\u2028 died"), SCORER)
    assert line.isascii()
    assert line.count(b"\n") == 1
    row = json.loads(line)
    assert (row["id"], row["verdict"], row["value"], row["reason"]) == ("\ud800é", "crashed", None, "\u2028 died")
    assert row["wall_s"] == 0.0
