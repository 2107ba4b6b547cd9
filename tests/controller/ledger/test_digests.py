"""Each fact has a digest over its columns and the fact before; an independent program computes the same."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ledger_entries import admit, finished, lineage, partial, shipped

from areal_like.errors import LedgerError
from controller.coordinator.effects import FilterGroup, RecordCheckpoint, RecordIncident
from controller.ledger.digests import Fact, all_facts, fact_digest, read_fact
from controller.ledger.ledger import LEDGER_FILE, Ledger, LedgerEntry
from controller.ledger.segment_store import HEADER


def sha256(*parts: Any) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(list(parts))).digest()


def recorded(folder: Path) -> dict[int, tuple[bytes, bytes | None, int | None]]:
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as db:
        return {seq: tuple(row) for seq, *row in db.execute("SELECT * FROM digests")}  # type: ignore[misc]


def test_digests_are_those_that_another_program_computes(tmp_path: Path) -> None:
    with Ledger(tmp_path, run_id="r") as ledger:
        ledger.apply([lineage(), admit(0), partial(0, 0, [0]), finished(0, [0, 0], 0.5)])
        ledger.apply([shipped(1, 0)])
        last = ledger.last_digest
    found = recorded(tmp_path)
    assert list(found) == [1, 2, 4, 5], "a partial answer is replaced, and has no digest"
    first = sha256("areal-like ledger", "r", 0)
    one = sha256(first, "lineage", 1, [["l0", 0, 1, 1, None, "wait", 1]], None, None)
    two = sha256(one, "admission", 2, [[0, 0, 1]], None, None)
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as db:
        (facts, file, offset, size) = db.execute("SELECT facts, file, offset, size FROM samples").fetchone()
        (groups,) = db.execute("SELECT groups FROM batches").fetchone()
    record = (tmp_path / "segments" / f"{file:06d}.seg").read_bytes()[offset : offset + size]
    payload = hashlib.sha256(record[HEADER.size :]).digest()
    row = [0, 0, 2, 0, 0, "scored", 0.5, 1, "rollout-0", facts, offset, size]
    four = sha256(two, "sample", 4, [row], payload, file)
    member = [0, payload, "scored", 0.5, 2, 0, 0]
    policy = sha256(None, 1, [[0, [None, 0], 0, [[0, member[1:]]]]], False)
    five = sha256(four, "batch", 5, [[1, "l0", 0, groups], [0, "consumed", "", "", 1]], policy, None)
    assert found == {1: (one, None, None), 2: (two, None, None), 4: (four, payload, file), 5: (five, policy, None)}
    assert last == five


def test_a_column_without_a_value_at_the_end_changes_nothing() -> None:
    short, long = (Fact(3, "incident", (row,)) for row in (("a", 1), ("a", 1, None, None)))
    assert fact_digest(b"x", short, None, None) == fact_digest(b"x", long, None, None)
    other = Fact(3, "incident", (("a", None, 1),))
    assert fact_digest(b"x", other, None, None) != fact_digest(b"x", short, None, None)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e-300, 0.1])
def test_a_fact_is_read_as_it_was_when_its_digest_was_made(tmp_path: Path, value: float) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0), finished(0, [0], value)])
    before = sha256("areal-like ledger", "", 0)
    stored = recorded(tmp_path)
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as db:
        for fact in all_facts(db):
            digest, content, file = stored[fact.seq]
            assert fact_digest(before, fact, content, file) == digest, fact
            keys = {"sample": [(0, 0)], "admission": [(0,)]}.get(fact.kind, [])
            assert read_fact(db, fact.seq, fact.kind, *keys) == fact
            before = digest


def test_a_transaction_that_fails_leaves_the_chain_as_it_was(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage(), admit(0)])
        before = ledger.last_digest
        with pytest.raises(LedgerError):
            ledger.apply([LedgerEntry(effect=RecordIncident(kind="incident", text="lost")), admit(0)])
        assert ledger.last_digest == before
        ledger.apply([admit(1)])
    with Ledger(tmp_path) as again:
        assert again.last_digest.hex() == max(recorded(tmp_path).items())[1][0].hex() != before.hex()


def test_a_checkpoint_has_the_digest_that_the_trainer_reported(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        reported = RecordCheckpoint(version=1, lineage="l0", path="c1", digest="ab" * 32)
        unknown = RecordCheckpoint(version=2, lineage="l0", path="c2")
        ledger.apply([lineage(), LedgerEntry(effect=reported), LedgerEntry(effect=unknown)])
    assert [content for _, content, _ in recorded(tmp_path).values()] == [None, b"\xab" * 32, None]


def test_a_ledger_whose_last_digest_is_lost_is_damaged(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as db:
        db.execute("DELETE FROM meta WHERE key = 'last_digest'")
        db.commit()
    with pytest.raises(LedgerError, match="last_digest"):
        Ledger(tmp_path)


def test_a_fact_without_its_row_is_an_error_of_the_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.apply([lineage()])
        with pytest.raises(LedgerError, match="refers to the row with the key"):
            ledger.apply([LedgerEntry(effect=FilterGroup(group_id=7, value=0.0))])
        ledger.apply([admit(0)])
