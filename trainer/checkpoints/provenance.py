"""provenance.json: from which checkpoint of which run an exported model was made, and the SHA-256 of each of its files.

Written into every exported folder, as its last file, and compared by `areal-like verify`. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from areal_like.errors import WeightError
from trainer.checkpoints.checkpoint import manifest_digest, read_state

PROVENANCE = "provenance.json"
FORMAT = 1


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of provenance.json.

    run_id: empty for a model that was imported. checkpoint: SHA-256 of the checkpoint's manifest. files: by name, all
    others of the folder.
    """

    run_id: str
    lineage: str
    version: int
    checkpoint: str
    files: Mapping[str, FileDigest]
    format: int = FORMAT


def write_provenance(folder: Path, checkpoint: Path) -> None:
    """Write the file into a complete folder that was exported from `checkpoint`. Raises WeightError, OSError."""
    state = read_state(checkpoint)
    found = Provenance(
        run_id=state.run_id,
        lineage=state.lineage,
        version=state.version,
        checkpoint=manifest_digest(checkpoint),
        files=_digests(folder),
    )
    _write(folder, found)


def renew_digests(folder: Path) -> None:
    """Replace the digests of files by those of the files as they are now, after they were decrypted; without
    provenance.json nothing is done. Raises WeightError, OSError.
    """
    if (found := read_provenance(folder)) is not None:
        _write(folder, msgspec.structs.replace(found, files=_digests(folder)))


def _digests(folder: Path) -> dict[str, FileDigest]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / PROVENANCE)
    return {str(file.relative_to(folder)): _digest(file) for file in files}


def _write(folder: Path, found: Provenance) -> None:
    (folder / PROVENANCE).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


def read_provenance(folder: Path) -> Provenance | None:
    """Read the file; None if there is none. Raises WeightError if it cannot be read."""
    file = folder / PROVENANCE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Provenance)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightError(f"{file} cannot be read ({error})") from error


def changed_files(folder: Path, recorded: Provenance) -> list[str]:
    """Describe each file that differs from what was recorded, or that was added or removed."""
    found = []
    for name, entry in sorted(recorded.files.items()):
        try:
            is_same = _digest(folder / name) == entry
        except OSError as error:
            found.append(f"{folder / name} cannot be read ({error.strerror})")
            continue
        if not is_same:
            found.append(f"{folder / name} differs from its digest in {PROVENANCE}")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    found += [f"{folder / name} is not in {PROVENANCE}" for name in sorted(there - {*recorded.files, PROVENANCE})]
    return found


def _digest(file: Path) -> FileDigest:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return FileDigest(num_bytes=opened.tell(), sha256=digest)
