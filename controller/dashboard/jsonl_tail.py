"""A JSON Lines file that grows, read by offset: each byte once.

Owns: the offset, the unfinished last line, files that were replaced or cut. Refuses: what a row means.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

CHUNK_BYTES = 4 << 20
"""Bounds the memory of one read; a file of an old run may have hundreds of megabytes."""


@dataclass
class JsonlTail:
    """Where reading has come to in one file."""

    path: Path
    num_damaged: int = 0
    _offset: int = 0
    _inode: int = -1
    _decoder: Any = field(default_factory=msgspec.json.Decoder)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Rows since the last call, and whether the file began again, so that earlier rows are void.

        A missing file has no rows. Raises OSError where the file cannot be read.
        """
        rows: list[dict[str, Any]] = []
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                began_again = self._inode not in (-1, found.st_ino) or found.st_size < self._offset
                if began_again:
                    self._offset = self.num_damaged = 0
                self._inode = found.st_ino
                file.seek(self._offset)
                while self._offset < found.st_size and self._take(file.read(CHUNK_BYTES), rows):
                    file.seek(self._offset)
        except FileNotFoundError:
            began_again = self._inode != -1
            self._offset, self._inode = 0, -1
        return rows, began_again

    def _take(self, data: bytes, rows: list[dict[str, Any]]) -> bool:
        """Whether a whole line was in it: the rest is read again with what follows."""
        end = data.rfind(b"\n") + 1
        if not end and len(data) == CHUNK_BYTES:  # a line of megabytes is none of ours
            end = len(data)
        for line in data[:end].split(b"\n"):
            if not line.strip():
                continue
            try:
                row = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("kind"), str):
                rows.append(row)
            else:
                self.num_damaged += 1
        self._offset += end
        return end > 0
