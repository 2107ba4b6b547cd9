"""The key of a run or an exported folder, derived from the user's key, and the file that marks an encrypted folder.

encryption.json at the top of an encrypted folder has a random salt, a value that tells a wrong key, and where the
user's key is; it contains nothing secret. Which data is encrypted follows from the folder that a file is in:
`run_key_of` finds the nearest encryption.json above it, so that no path of the program can forget it.

Keys are derived with HKDF-SHA256 (RFC 5869): the key of the run from the user's key and the salt, and from it a key for
each purpose. The formats are in sealed_file.py (files), record_cipher.py (segments) and texts.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_like.durable import flush_to_disk
from areal_like.encryption.master_key import KeyPlace, key_place, read_master_key
from areal_like.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARKER = "encryption.json"
FORMAT = 1
SALT_BYTES = 32
CHECK_BYTES = 16
MAX_DEPTH = 4
"""Folders between a file and the top of its run."""
INSTALL = "install it with: pip install 'areal-like[encryption]'"
RESTORE = "restore the file from a backup"


class _RecordedPlace(NamedTuple):
    """Where the user's key was when the folder was encrypted."""

    key_file: str | None
    key_env: str | None


class RunKey:
    """Keys of one encrypted folder. Shows none of them in its text."""

    def __init__(self, root: Path, secret: bytes) -> None:
        self.root = root
        self._secret = secret
        self._digests = self.derived(b"digests of samples")

    def __repr__(self) -> str:
        return f"RunKey({self.root})"

    @property
    def key_id(self) -> bytes:
        """Identifies the key, 16 bytes; says nothing about it."""
        return self.derived(b"key id")[:CHECK_BYTES]

    def derived(self, purpose: bytes, salt: bytes = b"") -> bytes:
        """A key of 32 bytes for one purpose."""
        return _hkdf(self._secret, salt, b"areal-like " + purpose)

    def cipher(self, purpose: bytes, salt: bytes = b"") -> AESGCM:
        """AES-256-GCM with the key of one purpose."""
        return _aes_gcm()(self.derived(purpose, salt))

    def digest(self, data: bytes) -> bytes:
        """HMAC-SHA256 of data: a plain hash of it would confirm a guess."""
        return hmac.digest(self._digests, data, hashlib.sha256)


_known: dict[tuple[Path, bytes, str], RunKey] = {}
"""By folder, its marker, and the place of the user's key."""


def encrypted_root(path: Path) -> Path | None:
    """The encrypted folder that a path is in, or is; None if it is in none."""
    path = path.absolute()
    for folder in (path, *path.parents[: MAX_DEPTH + 1]):
        if (folder / MARKER).is_file():
            return folder
    return None


def run_key_of(path: Path) -> RunKey | None:
    """The key of the encrypted folder that a path is in; None if it is in none.

    Raises MissingKey if the key cannot be read here, UserError if it is another key, or the marker is damaged.
    """
    root = encrypted_root(path)
    if root is None:
        return None
    raw, marker = _read_marker(root / MARKER)
    settings = _recorded_place(marker, root / MARKER)
    master = read_master_key(settings)
    cached = (root, raw, hashlib.sha256(master).hexdigest())
    if cached not in _known:
        key = _run_key(root, master, bytes.fromhex(marker["salt"]))
        if not hmac.compare_digest(key.key_id, bytes.fromhex(marker["key_id"])):
            what = f"the key in {key_place(settings)} is not the key that the data was encrypted with"
            raise UserError(what, where=str(root), remedy="use the key that the run was started with")
        _known[cached] = key
    return _known[cached]


def available_key(path: Path) -> RunKey | None:
    """As `run_key_of`, but None also if the key is not available: for displays that leave encrypted texts out."""
    try:
        return run_key_of(path)
    except UserError:
        return None


def check_key(path: Path) -> None:
    """Raise UserError if the path is in an encrypted folder and the key is missing or another one."""
    run_key_of(path)


def encrypt_folder(root: Path, settings: KeyPlace) -> RunKey:
    """Make a folder encrypted from now on, with a new key. Raises UserError (no key, no package), OSError."""
    key_file = None if settings.key_file is None else Path(settings.key_file).expanduser().resolve()
    if key_file is not None and key_file.is_relative_to(root.resolve().parent):
        what = f"the key {key_file} is in the folder of the data that it protects"
        raise UserError(what, where="encryption.key_file", remedy="store the key somewhere else")
    salt = secrets.token_bytes(SALT_BYTES)
    key = _run_key(root, read_master_key(settings), salt)
    marker = {
        "format": FORMAT, "salt": salt.hex(), "key_id": key.key_id.hex(), "key_env": settings.key_env,
        "key_file": None if key_file is None else str(key_file),
    }  # fmt: skip
    (root / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    flush_to_disk(root / MARKER)  # without it nothing of the folder can be read
    flush_to_disk(root)
    return key


def encrypt_as(source: Path, root: Path) -> bool:
    """Encrypt a new folder with the key of the folder that `source` is in; returns False if that is not encrypted."""
    found = encrypted_root(source)
    if found is None:
        return False
    (root / MARKER).write_bytes((found / MARKER).read_bytes())
    return True


def _read_marker(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        raw = path.read_bytes()
        marker = json.loads(raw)
        known = int(marker["format"])
        sizes = len(bytes.fromhex(marker["salt"])), len(bytes.fromhex(marker["key_id"]))
        if known == FORMAT and sizes != (SALT_BYTES, CHECK_BYTES):
            raise ValueError("a value has the wrong size")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the file cannot be read ({error})", where=str(path), remedy=RESTORE) from error
    if known != FORMAT:
        what = f"the file has format {known}, but this version of areal_like reads format {FORMAT}"
        raise UserError(what, where=str(path), remedy="use the version of areal_like that wrote the file")
    return raw, marker


def _recorded_place(marker: dict[str, Any], path: Path) -> _RecordedPlace:
    place = _RecordedPlace(marker.get("key_file"), marker.get("key_env"))
    named = [one for one in place if one is not None]
    if len(named) != 1 or not isinstance(named[0], str) or not named[0]:
        raise UserError("the file does not say where the key is", where=str(path), remedy=RESTORE)
    return place


def _run_key(root: Path, master: bytes, salt: bytes) -> RunKey:
    return RunKey(root, _hkdf(master, salt, b"areal-like key of a run"))


def _hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    _aes_gcm()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)


def _aes_gcm() -> type[AESGCM]:
    """The class of the package `cryptography`. Raises UserError if it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        what = "encryption requires the package cryptography, which is not installed"
        raise UserError(what, where="encryption", remedy=INSTALL) from error
    return AESGCM
