"""Claims about reading a growing file: each row once, whatever happens to the file."""

from __future__ import annotations

import pytest

from controller.dashboard import jsonl_tail
from controller.dashboard.jsonl_tail import JsonlTail


def row(number: int) -> str:
    return f'{{"kind":"step","step":{number}}}\n'


def steps(tail: JsonlTail) -> list[int]:
    return [found["step"] for found in tail.read()[0]]


@pytest.fixture
def tail(tmp_path):
    return JsonlTail(tmp_path / "metrics.jsonl")


def append(tail: JsonlTail, text: str) -> None:
    with tail.path.open("a") as file:
        file.write(text)


def test_every_row_comes_once_and_a_half_written_one_when_it_is_whole(tail):
    assert tail.read() == ([], False)
    append(tail, row(1) + row(2)[:9])
    assert steps(tail) == [1]
    assert steps(tail) == []
    append(tail, row(2)[9:] + row(3))
    assert steps(tail) == [2, 3]
    assert tail.num_damaged == 0


def test_damaged_lines_are_counted_and_passed_over(tail):
    append(tail, row(1) + "{broken\n" + "[1]\n" + '{"no":"kind"}\n' + "\n" + "\x00\x00\n" + row(2))
    assert steps(tail) == [1, 2]
    assert tail.num_damaged == 4


def test_a_file_that_was_cut_replaced_or_removed_begins_again(tail):
    append(tail, row(1) + row(2))
    assert steps(tail) == [1, 2]
    tail.path.write_text(row(7))
    assert tail.read() == ([{"kind": "step", "step": 7}], True)
    fresh = tail.path.with_suffix(".new")
    fresh.write_text(row(8) + row(9) + row(10))
    fresh.replace(tail.path)
    found, began_again = tail.read()
    assert began_again
    assert [one["step"] for one in found] == [8, 9, 10]
    tail.path.unlink()
    assert tail.read() == ([], True)
    assert tail.read() == ([], False)


def test_rows_that_do_not_fit_one_read_are_all_found(tail, monkeypatch):
    monkeypatch.setattr(jsonl_tail, "CHUNK_BYTES", 64)
    append(tail, "".join(row(number) for number in range(100)) + "x" * 200 + "\n" + row(100))
    assert steps(tail) == list(range(101))
    assert tail.num_damaged >= 1
