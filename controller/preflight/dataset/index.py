"""What a set stage remembers of earlier rows, in a temporary SQLite database.

Memory does not grow with the rows. A database without a name is private and temporary: SQLite keeps a cache of
CACHE_KIB in memory, writes the rest to a temporary file and removes the file itself, also when the process is killed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from areal_like.errors import OperationError
from controller.preflight.dataset.sketches import Sketch

CACHE_KIB = 16_384
"""Memory of each database."""


@contextmanager
def _named() -> Iterator[None]:
    """Turn errors of the database, such as a full disk, into OperationError."""
    try:
        yield
    except sqlite3.Error as error:
        what = f"the temporary file that stores earlier rows cannot be used: {error}"
        raise OperationError(f"{what}; set SQLITE_TMPDIR to a folder with more space") from error


@_named()
def _database(schema: str) -> sqlite3.Connection:
    database = sqlite3.connect("", isolation_level=None)
    database.executescript(
        f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -{CACHE_KIB}; {schema} BEGIN;"
    )
    return database


class SeenTexts:
    """Digests of texts, each with the place of its first row and a note."""

    def __init__(self) -> None:
        self._database = _database("CREATE TABLE seen (key BLOB PRIMARY KEY, place TEXT, note BLOB) WITHOUT ROWID;")

    @_named()
    def find_or_add(self, key: bytes, place: str, note: bytes) -> tuple[str, bytes] | None:
        """Place and note of the earlier text with this key, or None, and then it is remembered."""
        added = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, place, note))
        if added.rowcount:
            return None
        found: tuple[str, bytes] = self._database.execute(
            "SELECT place, note FROM seen WHERE key = ?", (key,)
        ).fetchone()
        return found

    def close(self) -> None:
        """Remove the database."""
        self._database.close()


class SimilarTexts:
    """Sketches of texts by band. Of the texts that share a band only the first is found through it, so that a text is
    compared with at most as many others as there are bands."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._database = _database(
            "CREATE TABLE texts (id INTEGER PRIMARY KEY, place TEXT, runs BLOB);"
            "CREATE TABLE bands (key INTEGER PRIMARY KEY, text INTEGER);"
        )

    @_named()
    def find(self, sketch: Sketch) -> tuple[str, float] | None:
        """Place and similarity of the most similar earlier text from the threshold on, or None."""
        marks = ",".join("?" * len(sketch.bands))
        rows = self._database.execute(
            "SELECT place, runs FROM texts WHERE id IN"
            f" (SELECT DISTINCT text FROM bands WHERE key IN ({marks})) ORDER BY id",
            sketch.bands,
        )
        best: tuple[str, float] | None = None
        for place, runs in rows:
            similarity = sketch.similarity(runs)
            if similarity >= self._threshold and (best is None or similarity > best[1]):
                best = place, similarity
        return best

    @_named()
    def add(self, sketch: Sketch, place: str) -> None:
        """Remember a text."""
        added = self._database.execute("INSERT INTO texts (place, runs) VALUES (?, ?)", (place, sketch.runs))
        self._database.executemany(
            "INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, added.lastrowid) for key in sketch.bands]
        )

    def find_or_add(self, sketch: Sketch, place: str) -> tuple[str, float] | None:
        """As `find`; a text to which no other is similar is remembered."""
        found = self.find(sketch)
        if found is None:
            self.add(sketch, place)
        return found

    def close(self) -> None:
        """Remove the database."""
        self._database.close()
