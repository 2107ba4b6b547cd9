"""The write-ahead log is copied by a thread: a commit never waits for the disk."""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

import pytest
from ledger_entries import admit, checkpoint, lineage, shipped

from controller.ledger import ledger as ledger_module
from controller.ledger import log_copier
from controller.ledger.ledger import Ledger, LedgerEntry
from controller.ledger.log_copier import LogCopier, copy_log

LIMIT_S = 60.0


class SlowDisk:
    """A copy of the log that ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_end, self.has_begun, self.num_copies = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(log_copier, "copy_log", self._copy)

    def _copy(self, database: sqlite3.Connection, path: Path, how: str) -> None:
        self.num_copies += 1
        self.has_begun.set()
        assert self.may_end.wait(LIMIT_S)
        copy_log(database, path, how)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.mark.parametrize("milestone", [lineage(), checkpoint(1), shipped(1, 0)])
def test_a_commit_does_not_wait_for_the_copy_that_it_requests(
    tmp_path: Path, disk: SlowDisk, milestone: LedgerEntry
) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([milestone])
        assert disk.has_begun.wait(LIMIT_S)
        ledger.apply([admit(7)])
        assert ledger.seq == 2
        assert not ledger.wait_for_copy(0.0)
        disk.may_end.set()
        assert ledger.wait_for_copy(LIMIT_S)


def test_a_request_during_a_copy_leads_to_one_further_copy(tmp_path: Path, disk: SlowDisk) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([lineage()])
        assert disk.has_begun.wait(LIMIT_S)
        for step in range(1, 4):
            ledger.apply([checkpoint(step)])
        disk.may_end.set()
        assert ledger.wait_for_copy(LIMIT_S)
        assert disk.num_copies == 2
        database = sqlite3.connect(f"file:{tmp_path}/ledger.sqlite?immutable=1", uri=True)
        assert database.execute("SELECT COUNT(*) FROM checkpoints").fetchone() == (3,), "all of it is in the file"
        database.close()


def test_many_commits_without_a_milestone_are_copied_too(tmp_path: Path, disk: SlowDisk,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    disk.may_end.set()
    monkeypatch.setattr(ledger_module, "LONG_LOG", 3)
    with Ledger(tmp_path, run_id="r") as ledger:
        for number in range(8):
            assert disk.num_copies == number // 3
            ledger.apply([admit(number)])
            assert ledger.wait_for_copy(LIMIT_S)


def test_sqlite_itself_copies_nothing_within_a_commit(tmp_path: Path, disk: SlowDisk) -> None:
    disk.may_end.set()
    with Ledger(tmp_path, run_id="r") as ledger:
        assert ledger._db.execute("PRAGMA wal_autocheckpoint").fetchone() == (0,)


def test_close_ends_the_thread_and_leaves_no_log(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, run_id="r")
    ledger.apply([lineage()])
    ledger.close()
    assert not any(thread.name == "ledger log" for thread in threading.enumerate())
    assert not (tmp_path / "ledger.sqlite-wal").exists()


def test_a_copy_that_fails_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plain.sqlite"
    copier = LogCopier(path)
    copier._database.close()
    with caplog.at_level(logging.WARNING):
        copier.request()
        assert copier.wait(LIMIT_S)
        copier.request()
        assert copier.wait(LIMIT_S)
    assert [record.getMessage() for record in caplog.records] == [
        f"the write-ahead log of {path} cannot be merged into the database yet (Cannot operate on a closed database.)"
    ] * 2
    copier.close()
