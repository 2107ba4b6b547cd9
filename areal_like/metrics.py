"""Numbers of a run as JSON lines: an append-only log that stays readable after a crash, and its reader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_like.encryption.texts import Texts
from areal_like.errors import add_file_name


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


_json = msgspec.json.Encoder(enc_hook=_plain)


def encode(record: Mapping[str, Any]) -> bytes:
    """JSON on one line. NaN and infinities become null (JSON cannot represent them)."""
    return _json.encode(dict(record))


class JsonlLog:
    """Appends records to `path`; each has been written to the operating system when `append` returns. In an encrypted
    run, fields that may quote content are encrypted (areal_like/encryption/texts.py)."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and UserError if the run is encrypted and its key is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._texts = Texts.to_write(path)
        was_cut = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)
        if was_cut:  # a crash left an incomplete line; the next record must start on a new one
            self._file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record as one line with one write."""
        with add_file_name(self._path):
            self._file.write(encode(self._texts.sealed_row(record)) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of `path`, without incomplete lines; empty if the file does not exist."""
    records, texts = [], Texts.to_show(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(record, dict):
            records.append(texts.opened_row(record))
    return records


def _ends_within_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
