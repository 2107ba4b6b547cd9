"""Encryption of short texts that are a field of a file or table that is otherwise in the clear.

A sealed text is `sealed:` and Base64 of a random nonce (12 bytes) and the ciphertext with its tag. The field's name is
the associated data. Random nonces of 96 bits are safe for 2**32 texts of a run (NIST SP 800-38D, section 8.3).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from areal_like.encryption.run_key import RunKey, available_key, run_key_of

PREFIX = "sealed:"
HIDDEN = "[encrypted]"
"""Shown for a text if the key is not available."""
CHANGED = "[changed since it was encrypted]"
"""Shown for a text that does not fit its tag."""
TEXT_FIELDS = frozenset({"answers", "slices", "clusters", "text", "reason", "detail", "error"})
"""Fields of rows of metrics.jsonl, of state.json and of summary.json that may quote prompts, answers or settings."""
_NONCE_BYTES = 12
_SEALED = re.compile(rf"{PREFIX}[A-Za-z0-9+/]{{38,}}={{0,2}}")


class Texts:
    """Seals and opens the texts of a folder. key: None if the folder is not encrypted, or the key is not available."""

    def __init__(self, key: RunKey | None) -> None:
        self._cipher = None if key is None else key.cipher(b"texts")

    @staticmethod
    def to_write(path: Path) -> Texts:
        """For writing into the folder of `path`. Raises UserError if it is encrypted and the key is missing."""
        return Texts(run_key_of(path))

    @staticmethod
    def to_show(path: Path) -> Texts:
        """For reading the folder of `path`; without the key, sealed texts are shown as `[encrypted]`."""
        return Texts(available_key(path))

    @property
    def is_sealing(self) -> bool:
        """Whether texts are encrypted."""
        return self._cipher is not None

    def sealed(self, field: str, text: str) -> str:
        """Encrypt a text; an empty one stays empty."""
        if self._cipher is None or not text:
            return text
        nonce = os.urandom(_NONCE_BYTES)
        data = nonce + self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), field.encode())
        return PREFIX + base64.b64encode(data).decode()

    def opened(self, field: str, text: str) -> str:
        """Decrypt a text that `sealed` returned; any other text is returned as it is."""
        if not text.startswith(PREFIX):
            return text
        if self._cipher is None:
            return HIDDEN
        try:
            data = base64.b64decode(text[len(PREFIX) :], validate=True)
            plain = self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], field.encode())
        except (binascii.Error, ValueError):
            return CHANGED
        except Exception:  # InvalidTag
            return CHANGED
        return plain.decode("utf-8", "surrogatepass")

    def opened_in(self, field: str, text: str) -> str:
        """Decrypt every sealed text within a text, such as in the lines of a log."""
        if PREFIX not in text:
            return text
        return _SEALED.sub(lambda match: self.opened(field, match[0]), text)

    def sealed_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Encrypt the fields of a row that may quote content (TEXT_FIELDS); numbers and other fields stay."""
        if self._cipher is None:
            return row
        return {key: self._sealed_value(key, value) if key in TEXT_FIELDS else value for key, value in row.items()}

    def opened_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Decrypt the fields of a row, in place. Without the key texts are `[encrypted]`, and lists are left out."""
        for key in TEXT_FIELDS & row.keys():
            value = row[key]
            if isinstance(value, str) and value.startswith(PREFIX):
                row[key] = self.opened(key, value)
            elif isinstance(value, list) and len(value) == 2 and value[0] == PREFIX:
                content = self.opened(key, str(value[1]))
                if content in (HIDDEN, CHANGED):
                    del row[key]
                else:
                    row[key] = msgspec.json.decode(content)
        return row

    def _sealed_value(self, field: str, value: Any) -> Any:
        if not value or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self.sealed(field, value)
        return [PREFIX, self.sealed(field, msgspec.json.encode(value, enc_hook=str).decode())]
