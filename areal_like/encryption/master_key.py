"""Reads the key that the user keeps: from a file or an environment variable. Errors never contain it."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from typing import Protocol

from areal_like.errors import UserError

KEY_BYTES = 32
KEY_FILE_VARIABLE = "AREAL_LIKE_ENCRYPTION_KEY_FILE"
"""Environment variable with the path of the key file, for a key that was moved since the run was started."""
MAKE_ONE = "create a key with: (umask 077; openssl rand -hex 32 > FILE)"
_MAX_FILE_BYTES = 4096


class KeyPlace(Protocol):
    """Where the key is: one of the two is set. As the section of the configuration has it (settings.py), whose library
    commands that only read files do not import.
    """

    @property
    def key_file(self) -> str | None: ...

    @property
    def key_env(self) -> str | None: ...


class MissingKey(UserError):
    """The key of encrypted data cannot be read here."""


def key_place(settings: KeyPlace) -> str:
    """Where the key is, for messages."""
    if moved := os.environ.get(KEY_FILE_VARIABLE):
        return f"the file {moved} ({KEY_FILE_VARIABLE})"
    if settings.key_env is not None:
        return f"the environment variable {settings.key_env}"
    return f"the file {settings.key_file}"


def read_master_key(settings: KeyPlace) -> bytes:
    """Read the key, 32 bytes. Raises MissingKey, and UserError for a text that is not a key."""
    place = key_place(settings)
    moved = os.environ.get(KEY_FILE_VARIABLE)
    if settings.key_env is not None and not moved:
        text = os.environ.get(settings.key_env, "").strip()
        if not text:
            what = f"the key is expected in {place}, which is not set"
            raise MissingKey(what, where="encryption", remedy=f"set it, or name a key file in {KEY_FILE_VARIABLE}")
    else:
        text = _file_text(Path(moved or str(settings.key_file)).expanduser(), place)
    key = _decoded(text)
    if key is None or len(key) != KEY_BYTES:
        what = f"{place} does not contain a key: 64 hexadecimal digits, or 32 bytes in Base64"
        raise UserError(what, where="encryption", remedy=MAKE_ONE)
    if len(set(key)) < 8:
        raise UserError(f"the key in {place} is not random", where="encryption", remedy=MAKE_ONE)
    return key


def _file_text(path: Path, place: str) -> str:
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read(_MAX_FILE_BYTES)
    except OSError as error:
        remedy = f"check the path, or set {KEY_FILE_VARIABLE} to the path of the key"
        what = f"the key cannot be read from {place} ({error.strerror})"
        raise MissingKey(what, where="encryption", remedy=remedy) from error
    if stat.S_IMODE(mode) & 0o007:
        raise UserError(f"other users can read {place}", where="encryption", remedy=f"run chmod 600 {path}")
    return data.decode("ascii", "replace").strip()


def _decoded(text: str) -> bytes | None:
    if re.fullmatch(r"[0-9a-fA-F]+", text) and len(text) == 2 * KEY_BYTES:
        return bytes.fromhex(text)
    try:
        return base64.b64decode(text, altchars=b"-_" if re.search(r"[-_]", text) else None, validate=True)
    except (binascii.Error, ValueError):
        return None
