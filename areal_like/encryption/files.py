"""Reads and writes files of a folder that may be encrypted; which it is follows from the folder (run_key.py)."""

from __future__ import annotations

import hashlib
import shutil
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from areal_like.encryption.run_key import MARKER, RESTORE, RunKey, run_key_of
from areal_like.encryption.sealed_file import SealedFileError, SealedWriter, is_sealed, unsealed

COPY_BYTES = 1 << 20


class Writer(Protocol):
    """A file that is being written. `num_bytes` and `sha256` are of the stored bytes, once it is closed."""

    num_bytes: int

    @property
    def sha256(self) -> str: ...

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainWriter:
    """Writes and hashes without encryption; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file: FileIO = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    @property
    def sha256(self) -> str:
        """Of the bytes, in hexadecimal digits."""
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all bytes; returns their number. Raises OSError."""
        left = memoryview(data).cast("B")
        taken = left.nbytes
        while left.nbytes:
            written = self._file.write(left)
            self._digest.update(left[:written])
            left = left[written:]
        self.num_bytes += taken
        return taken

    def __enter__(self) -> PlainWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def open_to_write(path: Path, *, renamed_to: Path | None = None) -> Writer:
    """Create or replace a file, encrypted if its folder is. renamed_to: the path that the file will be moved to.

    Raises UserError (no key), OSError.
    """
    key = run_key_of(path)
    return PlainWriter(path) if key is None else SealedWriter(path, key, renamed_to=renamed_to)


def key_to_read(path: Path) -> RunKey | None:
    """The key of an encrypted file; None for a file in the clear in a folder that is not encrypted.

    Raises UserError: the key is missing or another one, or the folder of an encrypted file does not say how it is
    encrypted.
    """
    key = run_key_of(path)
    if key is None and is_sealed(path):
        what = f"the file is encrypted, but the {MARKER} of its run is missing"
        raise SealedFileError(what, where=str(path), remedy=RESTORE)
    return key


def read_bytes(path: Path) -> bytes:
    """Read a whole file. Raises UserError (no key, changed), OSError."""
    key = key_to_read(path)
    return path.read_bytes() if key is None else b"".join(unsealed(path, key))


def read_text(path: Path) -> str:
    """Read a whole file of UTF-8 text. Raises UserError (no key, changed), UnicodeDecodeError, OSError."""
    return read_bytes(path).decode("utf-8")


def write_text(path: Path, text: str, *, renamed_to: Path | None = None) -> None:
    """Create or replace a file of UTF-8 text. renamed_to: the path that the file will be moved to.

    Raises UserError (no key), OSError.
    """
    with open_to_write(path, renamed_to=renamed_to) as file:
        file.write(text.encode("utf-8"))


def copy_plain(source: Path, target: Path) -> None:
    """Copy a file, decrypted if it is encrypted; one chunk is in memory at a time. Raises UserError, OSError."""
    key = run_key_of(source)
    if key is None or not is_sealed(source):
        shutil.copyfile(source, target)
        return
    with target.open("wb") as file:
        for chunk in unsealed(source, key):
            file.write(chunk)


def copy_encrypted(source: Path, target: Path) -> None:
    """Copy a file that is in the clear into a folder, encrypted if that folder is. Raises UserError, OSError."""
    with source.open("rb") as opened, open_to_write(target) as file:
        while chunk := opened.read(COPY_BYTES):
            file.write(chunk)
