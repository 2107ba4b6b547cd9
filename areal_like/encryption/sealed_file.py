"""Format of an encrypted file: a header, then chunks of AES-256-GCM. Written and read as a stream.

Header: magic "ALSF", format (u8), 3 zero bytes, chunk size in bytes (u32), length of the name (u32), salt (32 bytes),
id of the run's key (16 bytes), name (UTF-8). The file's key is derived from the key of the run and the salt. The last
chunk may be shorter than the others, or empty; every chunk is followed by its tag of 16 bytes.

Nonce of a chunk: its number (u64) and 1 for the last chunk, else 0 (u32). Associated data: the header, and the nonce.
So a file that was truncated, extended, reordered, exchanged for another one, or changed in any byte is not read;
numbers are little-endian. Stored size: header + data + 16 bytes for each chunk.

A file's name is its path in the run (`processes/trainer.json`); of a file in a checkpoint or an exported model that of
the folder and file (`step_000020/model.safetensors`, `model.safetensors`), so that a folder can be moved.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from areal_like.encryption.run_key import CHECK_BYTES, RESTORE, SALT_BYTES, RunKey
from areal_like.errors import UserError

MAGIC = b"ALSF"
FORMAT = 1
CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 1 << 26
TAG_BYTES = 16
MAX_NAME_BYTES = 4096
_HEAD = struct.Struct(f"<4sB3xII{SALT_BYTES}s{CHECK_BYTES}s")
_NONCE = struct.Struct("<QI")
_MOVED = ("checkpoints", "best", "final")
_BEING_WRITTEN = re.compile(r"\.(?P<name>.+)\.\d+\.(partial|replaced)")


class SealedFileError(UserError):
    """An encrypted file is damaged, was changed, or is another one."""


def name_in(root: Path, path: Path) -> str:
    """Name of a file within the encrypted folder `root`, to which its content is bound."""
    parts = list(path.absolute().relative_to(root).parts)
    parts = [match["name"] if (match := _BEING_WRITTEN.fullmatch(part)) else part for part in parts]
    return "/".join(parts[1:] if parts[0] in _MOVED and len(parts) > 1 else parts)


def is_sealed(path: Path) -> bool:
    """Whether a file has this format, by its first bytes; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class SealedWriter:
    """Encrypts what is written to it; a context manager. An incomplete file, without its last chunk, is never read.

    `num_bytes` and `sha256` are of the stored bytes, once the file is closed.
    """

    def __init__(
        self, path: Path, key: RunKey, *, renamed_to: Path | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """renamed_to: the path that the complete file will be moved to."""
        name = name_in(key.root, renamed_to or path).encode()
        salt = secrets.token_bytes(SALT_BYTES)
        self._header = _HEAD.pack(MAGIC, FORMAT, chunk_bytes, len(name), salt, key.key_id) + name
        self._cipher = key.cipher(b"file", salt)
        self._chunk_bytes = chunk_bytes
        self._pending = bytearray()
        self._number = 0
        self._digest = hashlib.sha256()
        self._file: FileIO = path.open("wb", buffering=0)
        self.num_bytes = 0
        self._put(self._header)

    @property
    def sha256(self) -> str:
        """Of the stored bytes, in hexadecimal digits."""
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Encrypt and write whole chunks; a rest is kept until the next call. Returns the number of bytes taken."""
        left = memoryview(data).cast("B")
        taken = left.nbytes
        while left.nbytes:
            room = self._chunk_bytes - len(self._pending)
            if not room:  # not before there is more: a full chunk may be the last one
                self._seal(is_last=False)
                room = self._chunk_bytes
            self._pending += left[:room]
            left = left[room:]
        return taken

    def close(self) -> None:
        """Write the last chunk and close the file. Raises OSError."""
        if not self._file.closed:
            try:
                self._seal(is_last=True)
            finally:
                self._file.close()

    def __enter__(self) -> SealedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _seal(self, *, is_last: bool) -> None:
        nonce = _NONCE.pack(self._number, is_last)
        self._put(self._cipher.encrypt(nonce, bytes(self._pending), self._header + nonce))
        self._pending.clear()
        self._number += 1

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left.nbytes:
            left = left[self._file.write(left) :]
        self._digest.update(data)
        self.num_bytes += len(data)


def unsealed(path: Path, key: RunKey) -> Iterator[bytes]:
    """Yield the content of an encrypted file, chunk by chunk, each verified before it is yielded.

    Raises SealedFileError (changed, truncated, another file or key), OSError.
    """
    with path.open("rb", buffering=0) as file:
        header, chunk_bytes, salt = _read_header(file, path, key)
        cipher, number = key.cipher(b"file", salt), 0
        end = os.fstat(file.fileno()).st_size
        while True:
            place = file.tell()
            sealed = _read(file, min(chunk_bytes + TAG_BYTES, end - place))
            is_last = file.tell() == end
            nonce = _NONCE.pack(number, is_last)
            try:
                plain = cipher.decrypt(nonce, sealed, header + nonce)
            except Exception as error:  # InvalidTag, and ValueError for fewer bytes than a tag has
                raise SealedFileError(
                    f"the data from byte {place} on was changed, or the file was truncated", where=str(path),
                    remedy=RESTORE,
                ) from error  # fmt: skip
            yield plain
            if is_last:
                return
            number += 1


def _read_header(file: BinaryIO | FileIO, path: Path, key: RunKey) -> tuple[bytes, int, bytes]:
    head = _read(file, _HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        what = "the file is not encrypted, although it belongs to encrypted data, so it was exchanged"
        raise SealedFileError(what, where=str(path), remedy=RESTORE)
    _, version, chunk_bytes, name_bytes, salt, key_id = _HEAD.unpack(head)
    if version != FORMAT:
        what = f"the file has format {version}, but this version of areal_like reads format {FORMAT}"
        raise SealedFileError(what, where=str(path), remedy="use the version of areal_like that wrote the file")
    if key_id != key.key_id:
        what = "the file was encrypted with the key of another run, so it was exchanged"
        raise SealedFileError(what, where=str(path), remedy=RESTORE)
    name = _read(file, min(name_bytes, MAX_NAME_BYTES))
    wanted = name_in(key.root, path)
    if name != wanted.encode() or not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        what = f"the file is {name.decode(errors='replace')[:200]!r}, not {wanted!r}, so it was exchanged or renamed"
        raise SealedFileError(what, where=str(path), remedy=RESTORE)
    return head + name, chunk_bytes, salt


def _read(file: BinaryIO | FileIO, num_bytes: int) -> bytes:
    parts, left = [], num_bytes
    while left > 0 and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
