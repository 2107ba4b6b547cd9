"""Schema versions of the ledger: creates it, migrates an older one, and rejects a newer one.

The current tables are in schema.py.

Only the controller migrates, when it opens the ledger for writing. Commands that read (`report`, `samples`) never write
into a run folder, so they accept every schema from `OLDEST_READABLE` on without migration.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from areal_like.errors import UserError
from controller.ledger.schema import SCHEMA

SCHEMA_VERSION = 8
"""Incremented, with an entry in `MIGRATIONS`, whenever `SCHEMA` changes, or the records change so that an older version
would misread them.
"""
OLDEST_READABLE = 1
"""Readers only use tables and columns that exist since this schema; increase it if a query needs a newer one."""

MIGRATIONS: Mapping[int, tuple[str, ...]] = {
    # Schema 1 was written with and without these three tables: they were added without a new number.
    1: (
        """CREATE TABLE IF NOT EXISTS trainer_restarts (
  seq INTEGER PRIMARY KEY, lineage TEXT NOT NULL UNIQUE, reason TEXT NOT NULL)""",
        """CREATE TABLE IF NOT EXISTS cut_samples (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID""",
        "CREATE TABLE IF NOT EXISTS incidents (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, text TEXT NOT NULL)",
    ),
    # Since schema 3 a sample's record may contain several trajectories, of which an older version would only train the
    # first. The tables are the same, and records of older runs are samples of one trajectory.
    2: (),
    # Before, a step made one pass over its batch.
    3: ("ALTER TABLE lineages ADD COLUMN passes_per_batch INTEGER NOT NULL DEFAULT 1",),
    # Before, the position of a group in the draw order was its number.
    4: (
        "ALTER TABLE groups ADD COLUMN draw INTEGER",
        """CREATE TABLE IF NOT EXISTS skipped_draws (
  draw INTEGER PRIMARY KEY, seq INTEGER NOT NULL, rate REAL NOT NULL, num_tokens REAL NOT NULL)""",
    ),
    # Until then every step took groups_per_step groups.
    5: ("ALTER TABLE lineages ADD COLUMN least_groups INTEGER",),
    # Until then no step trained on groups of earlier steps.
    6: (
        "ALTER TABLE lineages ADD COLUMN replay_groups INTEGER",
        "ALTER TABLE lineages ADD COLUMN replay_max_age INTEGER",
        "ALTER TABLE lineages ADD COLUMN replay_max_reuses INTEGER",
        "ALTER TABLE batches ADD COLUMN reused BLOB",
    ),
    # Facts recorded until then have no digests.
    7: (
        """CREATE TABLE IF NOT EXISTS digests (
  seq INTEGER PRIMARY KEY, digest BLOB NOT NULL, content BLOB, file INTEGER)""",
        "INSERT OR REPLACE INTO meta SELECT 'digests_since', value FROM meta WHERE key = 'seq'",
        "INSERT OR REPLACE INTO meta VALUES ('last_digest', '')",
    ),
}
"""Statements that convert schema N to N + 1. Never edited once released, unlike `SCHEMA`."""


def schema_version(db: sqlite3.Connection) -> int:
    """Schema of the ledger, 0 if none is recorded yet. Raises ValueError if it is not a positive number."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'").fetchone() is None:
        return 0
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None:
        return 0
    text = str(row[0])[:20]
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the schema version is {text!r}, not a positive integer")
    return int(text)


def is_readable(schema: int) -> bool:
    """Return whether this version of areal_like can read a ledger of that schema without migration."""
    return OLDEST_READABLE <= schema <= SCHEMA_VERSION


def newer_schema(path: Path, schema: int) -> UserError:
    """The error for a ledger written by a newer version of areal_like."""
    return UserError(
        f"the ledger was written by a newer version of areal_like and has schema version {schema}; this version "
        "supports schema versions up to "
        f"{SCHEMA_VERSION}",
        where=str(path),
        remedy="use the version of areal_like that wrote the ledger, or a newer version",
    )


def bring_up_to_date(db: sqlite3.Connection, run_id: str) -> int:
    """Create the tables of a new ledger, or migrate an older one in one transaction.

    Returns the schema that was found (0: new). A ledger of a newer schema is not changed; the caller rejects it. Raises
    sqlite3.Error or ValueError if the ledger is damaged.
    """
    found = schema_version(db)
    if found == 0:
        # Repeatable: a crash in between leaves tables without a schema number, and the next start repeats this.
        db.executescript(SCHEMA)
        facts = [("run_id", run_id), ("seq", "0"), ("digests_since", "0"), ("last_digest", "")]
        facts.append(("schema", str(SCHEMA_VERSION)))
        db.execute("BEGIN IMMEDIATE")
        db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", facts)
        db.execute("COMMIT")
    elif found < SCHEMA_VERSION:
        db.execute("BEGIN IMMEDIATE")
        for number in range(found, SCHEMA_VERSION):
            for statement in MIGRATIONS[number]:
                db.execute(statement)
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(SCHEMA_VERSION),))
        db.execute("COMMIT")
    return found
