"""Encryption of single records of an append-only file: each is one message of AES-256-GCM, read at random.

A file begins with a header: magic "ALSE", format (u8), 11 zero bytes, salt (32 bytes), id of the run's key (16 bytes).
Its key is derived from the key of the run and the salt. Nonce of a record: its offset in the file, which is used once,
because files are only appended to, and a session never appends to a file of an earlier one. Associated data: the number
of the file, and the offset. Order and number of records are covered by the digests of the ledger.
"""

from __future__ import annotations

import secrets
import struct

from areal_like.encryption.run_key import CHECK_BYTES, SALT_BYTES, RunKey

MAGIC = b"ALSE"
FORMAT = 1
HEADER = struct.Struct(f"<4sB11x{SALT_BYTES}s{CHECK_BYTES}s")
TAG_BYTES = 16
_PLACE = struct.Struct("<QQ")


class WrongRecord(ValueError):
    """A record or the header of its file was changed, or belongs to another place. The text says which."""


class RecordCipher:
    """Encrypts and decrypts the records of one file. number: of the file."""

    def __init__(self, key: RunKey, number: int, salt: bytes) -> None:
        self._number = number
        self._cipher = key.cipher(b"segment", salt)

    @staticmethod
    def create(key: RunKey, number: int) -> tuple[RecordCipher, bytes]:
        """The cipher of a new file, and the header with which the file begins."""
        salt = secrets.token_bytes(SALT_BYTES)
        return RecordCipher(key, number, salt), HEADER.pack(MAGIC, FORMAT, salt, key.key_id)

    @staticmethod
    def of(key: RunKey, number: int, header: bytes) -> RecordCipher:
        """The cipher of an existing file, from its first bytes. Raises WrongRecord."""
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise WrongRecord("the file is not encrypted, although it belongs to encrypted data, so it was exchanged")
        _, version, salt, key_id = HEADER.unpack(header[: HEADER.size])
        if version != FORMAT:
            raise WrongRecord(f"the file has format {version}, but this version of areal_like reads format {FORMAT}")
        if key_id != key.key_id:
            raise WrongRecord("the file was encrypted with the key of another run, so it was exchanged")
        return RecordCipher(key, number, salt)

    def sealed(self, payload: bytes, offset: int) -> bytes:
        """Encrypt a record that will begin at `offset` of the file. Call it once for an offset."""
        return self._cipher.encrypt(*self._bound(offset, payload))

    def opened(self, data: bytes, offset: int) -> bytes:
        """Decrypt the record at `offset`. Raises WrongRecord."""
        try:
            return self._cipher.decrypt(*self._bound(offset, data))
        except Exception as error:  # InvalidTag, and ValueError for fewer bytes than a tag has
            raise WrongRecord("the record was changed, or it is from another place or file") from error

    def _bound(self, offset: int, data: bytes) -> tuple[bytes, bytes, bytes]:
        place = _PLACE.pack(self._number, offset)
        return offset.to_bytes(12, "little"), data, place
