"""Erasing a row overwrites what a run has of it, and says what cannot be undone."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from recorded_run import copy_run

from controller.cli.main import main
from controller.config.loading import load_config
from controller.data.cleaned_rows import as_recorded
from controller.data.origins import record_data
from controller.ledger.ledger import Ledger
from controller.ledger.segment_store import HEADER, SegmentStore
from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE
from controller.runs.lineage.erasing import Erasure, words


def content(folder: RunFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.root.rglob("*")) if path.is_file()}


def payloads(folder: RunFolder, row: int, *, is_of_row: bool = True) -> list[bytes]:
    """Stored payloads of the row with this number, or of all others."""
    sign = "=" if is_of_row else "!="
    of_row = f"COALESCE(draw, group_id) % 7 {sign} ?"
    query = f"SELECT file, offset, size FROM samples JOIN groups USING (group_id) WHERE {of_row}"
    with contextlib.closing(sqlite3.connect(folder.ledger)) as db:
        places = db.execute(f"{query} AND file IS NOT NULL", (row,)).fetchall()
    found = []
    for file, offset, size in places:
        data = (folder.root / "segments" / f"{file:06d}.seg").read_bytes()
        found.append(data[offset + HEADER.size : offset + size])
    return found


def ask(capsys: pytest.CaptureFixture[str], folder: RunFolder, *words: str, status: int = 0) -> str:
    assert main(["lineage", str(folder.root), *words]) == status
    out, err = capsys.readouterr()
    return out + err


def test_without_yes_nothing_is_changed_and_every_model_is_named(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(run, tmp_path / "run")
    before = content(folder)
    found = json.loads(ask(capsys, folder, "--row", "id=r3", "--erase", "--json"))
    used = json.loads(ask(capsys, folder, "--row", "id=r3", "--json"))
    models = [one["name"] for one in used["nodes"] if one["kind"] in ("checkpoint", "export")]
    assert len(found["models"]) == len(models) > 0
    assert all(any(name in one for one in found["models"]) for name in models)
    assert found["erased_samples"] is None
    assert "add --yes to erase" in ask(capsys, folder, "--row", "id=r3", "--erase")
    assert content(folder) == before


def test_tokens_and_texts_of_the_row_alone_are_overwritten_and_the_run_still_verifies(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(run, tmp_path / "run")
    (folder.root / "report.html").write_text("texts of samples")
    (folder.root / "external").mkdir()
    gone, kept = payloads(folder, 3), payloads(folder, 3, is_of_row=False)
    assert gone
    words = ask(capsys, folder, "--row", "id=r3", "--erase", "--yes")
    assert f"erased: tokens and texts of {len(gone)} samples" in words
    assert "weights: version" in words
    assert "remove the row from" in words
    assert "answers in external/, which may have the row's texts" in words
    stored = b"".join(path.read_bytes() for path in (folder.root / "segments").glob("*.seg"))
    assert not any(one in stored for one in gone)
    assert all(one in stored for one in kept)
    assert payloads(folder, 3) == []
    assert not (folder.root / "report.html").exists()
    assert main(["verify", str(folder.root)]) == 0
    capsys.readouterr()
    record = json.loads((folder.root / "erased.jsonl").read_text())
    assert record["rows"][0].endswith("clean/rows.jsonl:4")
    assert record["steps"]
    assert "of 0 samples" in ask(capsys, folder, "--row", "id=r3", "--erase", "--yes")
    assert "went into" in ask(capsys, folder, "--row", "id=r3")


def test_a_sealed_run_is_sealed_again(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_run(run, tmp_path / "run")
    was_sealed = (folder.root / SEAL_FILE).exists()
    ask(capsys, folder, "--row", "id=r3", "--erase", "--yes")
    assert (folder.root / SEAL_FILE).exists() == was_sealed


def test_the_row_is_blanked_in_the_set_that_the_run_cleaned(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(run, tmp_path / "run")
    shutil.copytree(run.root.parent / "clean", folder.root / "data" / "train")
    stages = f"data: {{train: {{path: {run.root.parent}/raw.jsonl, stages: [schema]}}, shuffle: false}}\n"
    kept = [line for line in folder.config.read_text().splitlines(keepends=True) if not line.startswith("data:")]
    folder.config.write_text("".join([*kept, stages]))
    record_data(as_recorded(load_config(str(folder.config)).config, folder.root), folder.root)
    words = ask(capsys, folder, "--row", "id=r3", "--erase", "--yes")
    assert "the run cannot be resumed: its set has changed" in words
    rows = [json.loads(line) for line in (folder.root / "data" / "train" / "rows.jsonl").read_text().splitlines()]
    assert rows[3] == {"erased": True}
    assert [row["id"] for row in rows if "id" in row] == ["r0", "r1", "r2", "r4", "r5", "r6"]


def test_a_run_in_progress_is_refused_and_so_is_an_erasure_without_a_row(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_run(run, tmp_path / "run")
    with contextlib.closing(Ledger(folder.root, must_exist=True, keep_bytes=None)):
        before = content(folder)
        words = ask(capsys, folder, "--row", "id=r3", "--erase", "--yes", status=2)
        assert "another controller" in words
        assert {path for path in content(folder)} == {path for path in before}
    assert "no row is specified" in ask(capsys, folder, "--erase", status=2)


def test_scrubbing_keeps_the_given_records_and_nothing_else(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "segments", segment_bytes=1 << 20, fsync=False)
    places = [store.append(text) for text in (b"first", b"second", b"third", b"fourth")]
    store.flush()
    store.discard()
    kept: list[Any] = [places[3], places[1]]
    assert store.scrub(1, [(one.offset, one.size) for one in kept]) > 0
    assert [store.read(one) for one in kept] == [b"fourth", b"second"]
    data = store.path(1).read_bytes()
    assert b"first" not in data
    assert b"third" not in data
    assert len(data) == sum(one.size for one in places)
    assert store.scrub(1, [(one.offset, one.size) for one in kept]) == 0
    store.path(1).write_bytes(data[:2])  # a damaged file ends before its records
    store.scrub(1, [(one.offset, one.size) for one in kept])
    assert store.path(1).read_bytes() == bytes(2)
    store.close()


def test_one_group_is_named_as_one() -> None:
    made = Erasure(["a.jsonl:1"], [7], [], None, [], "")
    assert words(made, None)[0] == "1 group of a.jsonl:1, in no step"


def test_more_groups_can_be_erased_than_a_statement_has_variables(run: RunFolder, tmp_path: Path) -> None:
    folder = copy_run(run, tmp_path / "run")
    with contextlib.closing(Ledger(folder.root, must_exist=True, keep_bytes=None)) as ledger:
        assert ledger.erase(range(300_000)).num_samples > 0
