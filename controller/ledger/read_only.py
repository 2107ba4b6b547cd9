"""Opens the ledger of a run for commands that only read it, also while it is being written."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote

from areal_like.errors import UserError
from controller.ledger.migrations import SCHEMA_VERSION, is_readable, schema_version
from controller.run_folder.run_folder import RunFolder

BUSY_S = 10.0
"""Longest wait for a writer, in seconds."""


def open_ledger(folder: RunFolder) -> tuple[sqlite3.Connection, bool]:
    """Open the ledger read-only; return also whether all committed data is visible.

    Without a write-ahead log nothing is being written, so the file is opened as immutable, which creates no files.
    """
    path = folder.ledger.resolve()
    if path.with_name(f"{path.name}-wal").exists():
        try:
            return _connected(path, "mode=ro"), True
        except sqlite3.OperationalError as error:
            if "unable to open" not in str(error) and "readonly" not in str(error):
                raise
            # A folder of another user: to read the log SQLite needs an index file, which cannot be created here.
            return _connected(path, "mode=ro&immutable=1"), False
    return _connected(path, "mode=ro&immutable=1"), True


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def is_purged(run_dir: Path, file: int) -> bool:
    """Whether no row refers to a segment file by now: a reader whose view is older may meet a file that was deleted."""
    needed = "SELECT 1 FROM samples WHERE file = ? UNION ALL SELECT 1 FROM partials WHERE file = ?"
    try:
        db, _ = open_ledger(RunFolder(run_dir))
        with contextlib.closing(db):
            return db.execute(needed, (file, file)).fetchone() is None
    except sqlite3.Error:
        return False


def check_schema(db: sqlite3.Connection, folder: RunFolder) -> None:
    """Raise UserError if this version cannot read the ledger."""
    schema = schema_version(db)
    if not is_readable(schema):
        raise UserError(
            f"the ledger was written by a different version of areal_like: it has schema version {schema}, and this "
            f"version supports schema versions up to {SCHEMA_VERSION}",
            where=str(folder.ledger),
            remedy="use the version of areal_like that wrote the ledger",
        )
