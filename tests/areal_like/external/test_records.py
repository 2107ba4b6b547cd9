"""The file of recorded answers: several writers, what a crash leaves, and sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.external.records import AnswerRecords, records_file, totals_of

LINE: dict[str, Any] = {"model": "m", "tokens_in": 5, "tokens_out": 1, "cost": 0.5, "seconds": 2.0, "request": {"a": 1}}


def add(records: AnswerRecords, key: str, reply: Any = "yes", **fields: Any) -> None:
    records.add(key, **{**LINE, "reply": reply, **fields})


def test_what_one_writes_another_finds(tmp_path: Path) -> None:
    one, two = AnswerRecords(tmp_path / "a.jsonl"), AnswerRecords(tmp_path / "a.jsonl")
    add(one, "k1", {"text": "é\n"})
    assert two.find("k1") is None
    assert two.refresh().requests == 1
    assert two.find("k1") == {"text": "é\n"}
    add(two, "k2", [1, 2.5, None])
    one.refresh()
    assert one.find("k2") == [1, 2.5, None]
    assert (one.totals.requests, one.totals.tokens, one.totals.cost, one.totals.seconds) == (2, 12, 1.0, 4.0)


def test_the_first_of_equal_requests_is_found_and_all_are_counted(tmp_path: Path) -> None:
    records = AnswerRecords(tmp_path / "a.jsonl")
    add(records, "k", "first")
    add(records, "k", "second")
    assert (records.find("k"), records.totals.requests) == ("first", 2)


def test_a_line_that_a_crash_cut_is_skipped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    add(AnswerRecords(file), "k1")
    with file.open("ab") as handle:
        handle.write(b'{"key": "k2", "tokens_in": 7, "reply": "y')
    reader = AnswerRecords(file)
    assert reader.refresh().requests == 1
    add(AnswerRecords(file), "k3")
    assert reader.refresh().requests == 2
    assert (reader.find("k2"), reader.find("k3")) == (None, "yes")


def test_counts_without_texts_answer_nothing(tmp_path: Path) -> None:
    records = AnswerRecords(tmp_path / "a.jsonl")
    add(records, "k", None, request=None)
    assert (records.find("k"), records.totals.requests) == (None, 1)


def test_a_reply_is_found_behind_counts_of_the_same_request(tmp_path: Path) -> None:
    records = AnswerRecords(tmp_path / "a.jsonl")
    add(records, "k", None, request=None)
    add(records, "k", "second")
    add(records, "k", "third")
    assert (records.find("k"), records.totals.requests) == ("second", 3)


def test_without_a_file_there_are_sums_alone() -> None:
    records = AnswerRecords(None)
    add(records, "k")
    assert (records.refresh().tokens_in, records.find("k")) == (5, None)


def test_files_of_a_run_are_summed_by_name(tmp_path: Path) -> None:
    file = records_file(tmp_path, "llm_judge#2")
    add(AnswerRecords(file), "k")
    (tmp_path / "external" / "other.txt").write_text("")
    assert {name: sums.tokens for name, sums in totals_of(tmp_path / "external").items()} == {"llm_judge-2": 6}
    assert totals_of(tmp_path / "nothing") == {}


def test_the_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    add(AnswerRecords(tmp_path / "a.jsonl"), "k")
    assert (tmp_path / "a.jsonl").stat().st_mode & 0o077 == 0


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("areal_like.external.records.os.write", full)
    with pytest.raises(OSError, match="No space left") as raised:
        add(AnswerRecords(tmp_path / "a.jsonl"), "k")
    assert raised.value.filename == str(tmp_path / "a.jsonl")
