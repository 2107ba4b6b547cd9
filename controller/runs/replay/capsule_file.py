"""The file of a capsule: a zip archive (stored, not compressed) with a manifest of the SHA-256 of every other entry.

It holds JSON, safetensors, text and one record of batch_stream.py; nothing in it is executed or unpickled. The file may
come from anyone: unpacking it never writes more bytes than it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from areal_like.errors import UserError
from areal_like.plain_text import one_line

FORMAT = 1
MANIFEST = "manifest.json"
PIECE_BYTES = 16 << 20
_MAX_MANIFEST_BYTES = 16 << 20
REMEDY = "copy the file again from where it was created"
_IS_ENCRYPTED = 1
"""Bit of an entry's flags."""
_DAMAGES = (
    zipfile.BadZipFile, LookupError, ValueError, TypeError, NotImplementedError, EOFError, OverflowError, RuntimeError,
)  # fmt: skip
"""What zipfile and json raise for a file that is no capsule; RecursionError is a RuntimeError."""


def write_archive(file: Path, entries: Mapping[str, Path | bytes], facts: Mapping[str, Any]) -> str:
    """Write the archive completely or not at all.

    Args:
        file: a new file.
        entries: files and contents by their names in the archive.
        facts: what the manifest says besides the entries.

    Returns:
        The SHA-256 of the manifest, which stands for the whole archive.

    Raises:
        UserError: the file exists. OSError: it cannot be written.
    """
    if file.exists():
        raise UserError("the file already exists", where=str(file), remedy="choose a new file")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            recorded = {name: _add(archive, name, content) for name, content in sorted(entries.items())}
            manifest = json.dumps({"format": FORMAT, **facts, "entries": recorded}, indent=1).encode()
            archive.writestr(zipfile.ZipInfo(MANIFEST), manifest)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return hashlib.sha256(manifest).hexdigest()


def read_archive(file: Path, into: Path) -> dict[str, Any]:
    """Check every entry and unpack the archive into an empty folder; return its manifest. Raises UserError, naming the
    entry that was changed, is missing or is not in the manifest."""
    try:
        with zipfile.ZipFile(file) as archive:
            _refuse_compressed(archive, file)
            manifest = _manifest(archive, file)
            entries = manifest["entries"]
            names = Counter(name for name in archive.namelist() if name != MANIFEST)
            for name in [*entries, *names]:
                if name not in entries or names[name] != 1:
                    raise _damaged(file, f"{name} is {'missing' if name not in names else 'not in the manifest'}")
            if sum(_size(facts) for facts in entries.values()) > file.stat().st_size:
                raise _damaged(file, "the entries are larger than the file")
            for name, facts in entries.items():
                _unpack(archive, name, facts, into, file)
            return manifest
    except UserError:
        raise
    except _DAMAGES as error:
        raise _damaged(file, f"the file is not a complete capsule ({error})") from error


def _add(archive: zipfile.ZipFile, name: str, content: Path | bytes) -> dict[str, Any]:
    digest, num_bytes = hashlib.sha256(), 0
    entry = zipfile.ZipInfo(name)  # without the time: equal contents make equal archives
    with archive.open(entry, "w", force_zip64=True) as target:
        for piece in _pieces(content):
            target.write(piece)
            digest.update(piece)
            num_bytes += len(piece)
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _pieces(content: Path | bytes) -> Any:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as opened:
        while piece := opened.read(PIECE_BYTES):
            yield piece


def _refuse_compressed(archive: zipfile.ZipFile, file: Path) -> None:
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _IS_ENCRYPTED:
            raise _damaged(file, f"{entry.filename} is compressed or encrypted, but entries of a capsule never are")


def _size(facts: Mapping[str, Any]) -> int:
    num_bytes = facts["num_bytes"]
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise ValueError(f"num_bytes: {num_bytes}")
    return num_bytes


def _manifest(archive: zipfile.ZipFile, file: Path) -> dict[str, Any]:
    if archive.getinfo(MANIFEST).file_size > _MAX_MANIFEST_BYTES:
        raise ValueError("the manifest is too large")
    manifest = json.loads(archive.read(MANIFEST))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("entries"), dict):
        raise ValueError("the manifest has no entries")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"the file has format {manifest.get('format')}, but this version of areal_like reads format {FORMAT}",
            where=str(file),
            remedy="use a version of areal_like that reads this format",
        )
    return manifest


def _unpack(archive: zipfile.ZipFile, name: str, facts: Mapping[str, Any], into: Path, file: Path) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise _damaged(file, f"{name!r} is not a valid entry name")
    target = into.joinpath(*path.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), _size(facts)
    try:
        with archive.open(name) as source, target.open("wb") as written:
            while left >= 0 and (piece := source.read(PIECE_BYTES)):
                digest.update(piece)
                written.write(piece)
                left -= len(piece)
    except zipfile.BadZipFile as error:
        raise _damaged(file, f"{name} is damaged") from error
    if left or digest.hexdigest() != facts["sha256"]:
        raise _damaged(file, f"{name} was changed: its SHA-256 differs from the one in the manifest")


def _damaged(file: Path, what: str) -> UserError:
    return UserError(one_line(what), where=str(file), remedy=REMEDY)
