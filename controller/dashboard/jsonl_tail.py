"""Reads a growing JSON Lines file by offset, each byte once.

Handles an incomplete last line, and files that were replaced or truncated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from areal_like.encryption.texts import Texts

CHUNK_BYTES = 4 << 20
"""Bytes of one read; a file of an old run may have hundreds of megabytes."""


@dataclass
class JsonlTail:
    """Reading position in one file."""

    path: Path
    num_damaged: int = 0
    _offset: int = 0
    _inode: int = -1
    _decoder: Any = field(default_factory=msgspec.json.Decoder)
    _texts: Texts = field(default_factory=lambda: Texts(None))

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows since the last call, and whether the file was restarted, which invalidates earlier rows.

        A missing file has no rows. Raises OSError if the file cannot be read.
        """
        rows: list[dict[str, Any]] = []
        self._texts = Texts.to_show(self.path)
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
        """Parse complete lines; return whether there was one. An incomplete rest is read again with the following
        bytes.
        """
        end = data.rfind(b"\n") + 1
        if not end and len(data) == CHUNK_BYTES:  # a line of megabytes was not written by this program
            end = len(data)
        for line in data[:end].split(b"\n"):
            if not line.strip():
                continue
            try:
                row = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                row = None
            if isinstance(row, dict) and isinstance(row.get("kind"), str):
                rows.append(self._texts.opened_row(row))
            else:
                self.num_damaged += 1
        self._offset += end
        return end > 0
