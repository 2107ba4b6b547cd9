"""Copies the ledger's write-ahead log into the database in a separate thread, because SQLite waits for the disk during
the copy.

The time of copies is decided in ledger.py.

The controller commits on its event loop, which also sends the heartbeats. A commit only writes to the page cache, but
copying the log calls fsync, which takes seconds on a disk that is busy with other data.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

log = logging.getLogger(__name__)


class LogCopier:
    """One thread with one connection. SQLite allows another connection to read and write while the log is copied."""

    def __init__(self, path: Path) -> None:
        """Start the thread.

        Args:
            path: the database file, in WAL mode.
        """
        self._path = path
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._is_closing = False
        self._database = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)
        self._thread = threading.Thread(target=self._run, name="ledger log", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Request a copy of the log. Returns immediately; requests during a copy lead to one further copy."""
        self._idle.clear()
        self._wake.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no copy is requested or in progress.

        Args:
            timeout_s: the longest wait, in seconds.

        Returns:
            Whether this is the case.
        """
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """End the thread, after the copy in progress."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        self._database.close()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._is_closing:
                return
            copy_log(self._database, self._path, "PASSIVE")
            if not self._wake.is_set():
                self._idle.set()
                if self._wake.is_set():  # requested between the two lines
                    self._idle.clear()


def copy_log(database: sqlite3.Connection, path: Path, how: str) -> None:
    """Copy the write-ahead log into the database. If that fails, the log keeps all data and a warning is logged.

    Args:
        database: a connection to it.
        path: the database file, for the warning.
        how: SQLite's mode: PASSIVE does not wait, TRUNCATE waits for readers and empties the log.
    """
    try:
        database.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
    except sqlite3.Error as error:
        log.warning("the write-ahead log of %s cannot be merged into the database yet (%s)", path, error)
