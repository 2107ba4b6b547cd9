"""Ledgers of other schema versions: older ones are migrated, newer and damaged ones are refused untouched."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import run_zoo as zoo
from ledger_entries import admit, checkpoint, finished, lineage, partial, shipped
from old_ledger import make_old

from areal_like.errors import LedgerError, UserError
from controller.coordinator.effects import DropGroup, RecordIncident
from controller.coordinator.snapshot import LedgerState
from controller.ledger import migrations
from controller.ledger.audit import audit
from controller.ledger.ledger import LEDGER_FILE, Ledger, LedgerEntry
from controller.ledger.migrations import MIGRATIONS, OLDEST_READABLE, SCHEMA_VERSION
from controller.ledger.sample_reader import read_samples
from controller.runs.sample_rows import Choice
from controller.runs.sample_rows import read_samples as read_rows


def fill(folder: Path) -> LedgerState:
    """A ledger with a consumed, a dropped and a live group; its state when it was closed."""
    with Ledger(folder, run_id="r") as ledger:
        ledger.apply([lineage(), *(admit(i) for i in range(4)), finished(0, [0, 0]), finished(2, [0])])
        ledger.apply([shipped(1, 0), LedgerEntry(effect=DropGroup(group_id=1, reason="timeout")), checkpoint(1)])
        ledger.apply([partial(3, 0, [0, 0])])
        return ledger.load()


def tables(folder: Path) -> dict[str, str]:
    """SQL of every table and index by name."""
    db = sqlite3.connect(folder / LEDGER_FILE)
    try:
        return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
    finally:
        db.close()


def schema_in(folder: Path) -> str:
    """The schema number on disk."""
    db = sqlite3.connect(folder / LEDGER_FILE)
    try:
        return str(db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0])
    finally:
        db.close()


def set_schema(folder: Path, value: str) -> None:
    """Record another schema number."""
    db = sqlite3.connect(folder / LEDGER_FILE)
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (value,))
    db.commit()
    db.close()


def test_an_older_ledger_is_migrated_on_opening_and_the_run_goes_on(tmp_path: Path) -> None:
    before = fill(tmp_path)
    make_old(tmp_path / LEDGER_FILE)
    assert "incidents" not in tables(tmp_path)
    with Ledger(tmp_path, must_exist=True) as ledger:
        assert ledger.load() == before
        assert ledger.run_id == "r"
        assert ledger.prefix(3, 0).tokens_R.tolist() == [0, 1]
        # Writes to each table that the old ledger did not have: an incident, and a dropped group with partial tokens.
        ledger.apply([LedgerEntry(effect=RecordIncident(kind="incident", text="disk full"))])
        ledger.apply([LedgerEntry(effect=DropGroup(group_id=3, reason="timeout"))])
        assert sum(fact.count for fact in ledger.length_facts() if not fact.is_finished) == 1
    assert schema_in(tmp_path) == str(SCHEMA_VERSION)
    assert audit(tmp_path).findings == ()
    with Ledger(tmp_path, must_exist=True) as ledger:
        assert ledger.load().dropped == {"timeout": 2}


def test_a_migrated_ledger_has_the_same_tables_as_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        fill(folder)
    make_old(old / LEDGER_FILE)
    Ledger(old).close()
    assert {name: sql.split() for name, sql in tables(old).items()} == {
        name: sql.split() for name, sql in tables(new).items()
    }


def test_every_older_schema_has_a_migration() -> None:
    assert list(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
    assert 1 <= OLDEST_READABLE <= SCHEMA_VERSION


def test_a_migration_that_fails_leaves_the_old_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fill(tmp_path)
    make_old(tmp_path / LEDGER_FILE)
    old = tables(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", {1: (*MIGRATIONS[1], "INSERT INTO no_such_table VALUES (1)")})
        with pytest.raises(LedgerError, match="no_such_table"):
            Ledger(tmp_path)
    assert tables(tmp_path) == old
    assert schema_in(tmp_path) == "1"
    with Ledger(tmp_path) as ledger:
        assert ledger.load() == before


def test_a_newer_ledger_is_refused_untouched(tmp_path: Path) -> None:
    fill(tmp_path)
    make_old(tmp_path / LEDGER_FILE)
    set_schema(tmp_path, str(SCHEMA_VERSION + 1))
    before = tables(tmp_path)
    with pytest.raises(
        UserError, match=rf"written by a newer version of areal_like and has schema version {SCHEMA_VERSION + 1}"
    ) as refused:
        Ledger(tmp_path)
    assert "use the version of areal_like that wrote the ledger" in str(refused.value)
    assert tables(tmp_path) == before


@pytest.mark.parametrize("schema", ["0", "-1", "two", ""])
def test_a_schema_that_is_no_number_means_a_damaged_ledger(tmp_path: Path, schema: str) -> None:
    fill(tmp_path)
    set_schema(tmp_path, schema)
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(tmp_path)


def test_a_ledger_whose_creation_was_interrupted_is_completed(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / LEDGER_FILE)
    db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")
    db.close()
    with Ledger(tmp_path, run_id="r") as ledger:
        assert ledger.run_id == "r"
        assert ledger.load().num_drawn == 0


def test_report_and_samples_read_an_older_ledger_without_changing_it(tmp_path: Path) -> None:
    folder = zoo.make_sampled_run(tmp_path)
    stats, rows = read_samples(folder.ledger, max_samples=100), read_rows(folder, Choice())
    make_old(folder.ledger)
    content = folder.ledger.read_bytes()
    old_stats, old_rows = read_samples(folder.ledger, max_samples=100), read_rows(folder, Choice())
    assert stats is not None
    assert old_stats is not None
    assert old_stats.verdicts == stats.verdicts
    assert old_rows.samples == rows.samples
    assert folder.ledger.read_bytes() == content
