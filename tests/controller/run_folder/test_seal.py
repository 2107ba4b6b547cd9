"""A seal covers the files of an ended run; every changed, removed or added file is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.run_folder.run_folder import RunFolder
from controller.run_folder.seal import SEAL_FILE, break_seal, changed_files, read_seal, write_seal


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path, "run")
    for path in (run.config, run.metrics, run.ledger, run.root / "segments" / "000001.seg"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)
    write_seal(run, run_id="r", last_digest="ab")
    return run


def changes(run: RunFolder) -> list[str]:
    seal = read_seal(run)
    assert seal is not None
    return list(changed_files(run, seal))


def test_an_unchanged_run_has_no_changes(folder: RunFolder) -> None:
    seal = read_seal(folder)
    assert seal is not None
    assert (seal["run_id"], seal["last_digest"]) == ("r", "ab")
    assert list(seal["files"]) == ["config.yaml", "metrics.jsonl", "ledger.sqlite", "segments/000001.seg"]
    assert changes(folder) == []


def test_changed_removed_and_added_files_are_named(folder: RunFolder) -> None:
    folder.metrics.write_text("metrics.jsonk")
    folder.config.unlink()
    (folder.root / "segments" / "000002.seg").write_text("new")
    assert changes(folder) == [
        f"{folder.config} cannot be read (No such file or directory), but it is in {SEAL_FILE}",
        f"{folder.metrics} differs from its digest in {SEAL_FILE}",
        f"{folder.root / 'segments' / '000002.seg'} is not in {SEAL_FILE}, because it was added later",
    ]


def test_a_ledger_whose_log_is_not_copied_yet_is_left_out(folder: RunFolder) -> None:
    folder.ledger.with_name("ledger.sqlite-wal").write_text("facts")
    write_seal(folder, run_id="r", last_digest="ab")
    seal = read_seal(folder)
    assert seal is not None
    assert "ledger.sqlite" not in seal["files"]
    assert changes(folder) == []
    folder.ledger.with_name("ledger.sqlite-wal").unlink()  # another program has copied it into the file
    assert changes(folder) == []


def test_a_broken_seal_is_gone_and_a_damaged_one_an_error(folder: RunFolder) -> None:
    (folder.root / SEAL_FILE).write_text('{"format": 2, "files": {}}')
    with pytest.raises(ValueError, match="the file does not have format 1"):
        read_seal(folder)
    break_seal(folder)
    break_seal(folder)
    assert read_seal(folder) is None


def test_a_name_that_no_file_can_have_is_a_change(folder: RunFolder) -> None:
    seal = read_seal(folder)
    assert seal is not None
    seal["files"]["a\0b"] = {}
    assert "cannot be read (embedded null byte)" in next(changed_files(folder, seal))
