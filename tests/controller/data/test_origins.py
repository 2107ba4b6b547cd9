"""Files with hashes and manifests, and the lines of rows before their sets were cleaned."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.data.origins import ORIGINS, Origins, describe_file, read_record, split_place
from controller.preflight.dataset.cleaning import CleaningJob
from controller.preflight.dataset.registry import Plan, StageSpec


@pytest.fixture
def cleaned(tmp_path: Path) -> Path:
    """A set that was cleaned twice; raw line 3 is blank, and line 2 and the last row are removed."""
    good = [json.dumps({"prompt": f"What is {n} plus two?", "answer": str(n)}) for n in range(4)]
    (tmp_path / "raw.jsonl").write_text("\n".join([good[0], "{", "", *good[1:], good[0]]) + "\n")
    CleaningJob([str(tmp_path / "raw.jsonl")], Plan((StageSpec("schema"),)), 1).clean(tmp_path / "one")
    once = [str(tmp_path / "one" / "rows.jsonl")]
    CleaningJob(once, Plan((StageSpec("exact_duplicates"),)), 1).clean(tmp_path / "two")
    return tmp_path / "two" / "rows.jsonl"


def test_a_row_is_followed_through_every_cleaning_to_its_first_file(cleaned: Path) -> None:
    described = describe_file(cleaned)
    assert described["sha256"] == hashlib.sha256(cleaned.read_bytes()).hexdigest()
    raw = cleaned.parents[1] / "raw.jsonl"
    for line, original in ((1, 1), (2, 4), (4, 6)):
        places, why = Origins().chain(f"{cleaned}:{line}", described)
        assert [one["where"] for one in places] == [f"{cleaned.parents[1]}/one/rows.jsonl:{line}", f"{raw}:{original}"]
        assert places[1]["sha256"] == hashlib.sha256(raw.read_bytes()).hexdigest()
        assert why == ""


def test_a_changed_file_is_not_said_to_be_of_the_set(cleaned: Path) -> None:
    cleaned.write_text(cleaned.read_text() + cleaned.read_text())
    assert "set" not in describe_file(cleaned)


def test_damaged_and_missing_origins_are_named(cleaned: Path) -> None:
    described = describe_file(cleaned)
    origins = cleaned.with_name(ORIGINS)
    origins.write_text("x")
    assert Origins().chain(f"{cleaned}:1", described) == ([], f"{origins} has changed since")
    origins.unlink()
    assert Origins().chain(f"{cleaned}:1", described)[1].startswith(f"{origins} cannot be read")
    del described["set"]["origins"]
    assert "earlier version" in Origins().chain(f"{cleaned}:1", described)[1]


def test_places_of_every_kind_of_file_are_understood() -> None:
    assert split_place("a b.jsonl:12") == ("a b.jsonl", 12)
    assert split_place("/x/rows.parquet row 3") == ("/x/rows.parquet", 3)
    assert split_place("rows.json entry 0") == ("rows.json", 0)
    assert split_place("running_sum row 7") == ("running_sum", 7)
    assert split_place("id=12") is None


def test_a_damaged_record_is_the_users_to_restore(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {"sources": []}
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        read_record(tmp_path)
