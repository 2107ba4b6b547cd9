"""Rewrites a ledger as the first release wrote it: schema 1, without the tables that were added since."""

from __future__ import annotations

import sqlite3
from pathlib import Path

FIRST_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE lineages (
  seq INTEGER PRIMARY KEY, lineage TEXT NOT NULL UNIQUE, checkpoint_version INTEGER NOT NULL,
  groups_per_step INTEGER NOT NULL, group_size INTEGER NOT NULL, max_staleness INTEGER, on_stale TEXT NOT NULL);
CREATE TABLE groups (
  group_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, started INTEGER NOT NULL, seq INTEGER NOT NULL,
  fate TEXT NOT NULL DEFAULT 'live', reason TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '',
  step INTEGER, end_seq INTEGER);
CREATE INDEX live_groups ON groups (group_id) WHERE fate = 'live';
CREATE TABLE partials (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, start INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  first_version INTEGER NOT NULL, last_version INTEGER NOT NULL,
  file INTEGER NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index, start)) WITHOUT ROWID;
CREATE TABLE samples (
  group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, seq INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
  first_version INTEGER NOT NULL, last_version INTEGER NOT NULL, verdict_kind TEXT NOT NULL, value REAL,
  is_kept INTEGER NOT NULL, worker TEXT NOT NULL, facts BLOB NOT NULL,
  file INTEGER, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE INDEX stored_samples ON samples (file) WHERE file IS NOT NULL;
CREATE TABLE batches (
  seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, lineage TEXT NOT NULL, is_replay INTEGER NOT NULL,
  groups BLOB NOT NULL, UNIQUE (step, lineage));
CREATE TABLE checkpoints (
  seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, lineage TEXT NOT NULL, path TEXT NOT NULL);
CREATE TABLE evals (
  seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, lineage TEXT NOT NULL, kind TEXT NOT NULL, "values" BLOB NOT NULL);
"""
TABLES = ("meta", "lineages", "groups", "partials", "samples", "batches", "checkpoints", "evals")


def make_old(path: Path) -> None:
    """Replace the closed ledger at `path` by one of schema 1 with the same rows."""
    old = path.with_name("old.sqlite")
    db = sqlite3.connect(old, isolation_level=None)
    db.executescript(FIRST_SCHEMA)
    db.execute("ATTACH ? AS current", (str(path),))
    for table in TABLES:
        columns = ", ".join(f'"{row[1]}"' for row in db.execute(f"PRAGMA main.table_info({table})"))
        db.execute(f"INSERT INTO main.{table} SELECT {columns} FROM current.{table}")
    db.execute("UPDATE main.meta SET value = '1' WHERE key = 'schema'")
    db.execute("DELETE FROM main.meta WHERE key IN ('digests_since', 'last_digest')")
    db.close()
    old.replace(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
