"""Lines of files: what is streamed, and what counts as unreadable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_like.errors import OperationError, UserError
from controller.preflight.dataset import reading
from controller.preflight.dataset.reading import Line, find_sources, lines_of, parse


def test_blank_lines_and_a_byte_order_mark_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert [(line.where, line.text) for line in lines_of(find_sources([str(path)]))] == [
        (f"{path}:1", b'{"a": 1}'), (f"{path}:4", b'{"a": 2}'),
    ]  # fmt: skip


def test_a_line_that_is_too_long_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 16)
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 8)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 100 + b'"}\n{"a": 2}\n')
    first, second = lines_of(find_sources([str(path)]))
    assert first.text is None
    assert "longer than" in parse(first)[1]
    assert parse(second) == ({"a": 2}, "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"{", "the line is not JSON"), (b'{"a": NaN}', "contains NaN"), (b"\xff", "not UTF-8 (byte 1"),
        (b"[1]", "a row must be a JSON object, not list"), (b'{"a": ' + b"[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_an_unreadable_line_says_why(text: bytes, fault: str) -> None:
    assert fault in parse(Line("rows.jsonl:1", text))[1]


def test_a_file_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="is listed twice"):
        find_sources([str(path), str(tmp_path / "*.jsonl")])


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(reading, "PARQUET_ROWS", 2)
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), path)
    assert [parse(line)[0]["prompt"] for line in lines_of(find_sources([str(path)]))] == ["a", "b", "c"]


def test_a_file_of_the_same_size_that_was_written_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    sources = find_sources([str(path)])
    path.write_text('{"a": 2}\n')
    os.utime(path, ns=(0, sources[0].modified_ns + 1))
    with pytest.raises(OperationError, match="changed while it was being read"):
        list(lines_of(sources))
