"""seal.json: the SHA-256 of the files of a run, written when a session ends.

It covers files without digests of their own: the configuration, metrics, summary, the ledger's file, segment files, and
provenance.json of the final model. It is removed when the run is resumed. Compared by `areal-like verify`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.durable import flush_to_disk
from controller.run_folder.run_folder import RunFolder

SEAL_FILE = "seal.json"
FORMAT = 1


def write_seal(folder: RunFolder, *, run_id: str, last_digest: str) -> None:
    """Write the seal of a run whose files are closed. last_digest: of the ledger's newest fact, in hexadecimal digits.

    Raises OSError.
    """
    files = {str(path.relative_to(folder.root)): _entry(path) for path in _sealed(folder)}
    seal = {"format": FORMAT, "run_id": run_id, "last_digest": last_digest, "files": files}
    fresh = folder.root / f"{SEAL_FILE}.new"
    fresh.write_text(json.dumps(seal, indent=1) + "\n")
    flush_to_disk(fresh)
    fresh.replace(folder.root / SEAL_FILE)


def break_seal(folder: RunFolder) -> None:
    """Remove the seal, because the files change from now on."""
    (folder.root / SEAL_FILE).unlink(missing_ok=True)


def read_seal(folder: RunFolder) -> dict[str, Any] | None:
    """The seal; None if there is none. Raises ValueError (damaged), OSError."""
    try:
        seal = json.loads((folder.root / SEAL_FILE).read_text())
    except FileNotFoundError:
        return None
    if not isinstance(seal, dict) or seal.get("format") != FORMAT or not isinstance(seal.get("files"), dict):
        raise ValueError(f"the file does not have format {FORMAT}")
    return seal


def changed_files(folder: RunFolder, seal: dict[str, Any]) -> Iterator[str]:
    """Describe each sealed file that differs, and each file that was added to those that are sealed.

    A ledger that is not sealed is no addition: its log was not copied yet. Its facts have digests.
    """
    for name, entry in sorted(seal["files"].items()):
        path = folder.root / name
        try:
            if _entry(path) != entry:
                yield f"{path} differs from its digest in {SEAL_FILE}"
        except (OSError, ValueError) as error:
            yield f"{path} cannot be read ({getattr(error, 'strerror', error)}), but it is in {SEAL_FILE}"
    for path in _sealed(folder):
        if path != folder.ledger and str(path.relative_to(folder.root)) not in seal["files"]:
            yield f"{path} is not in {SEAL_FILE}, because it was added later"


def _sealed(folder: RunFolder) -> Iterator[Path]:
    log = folder.ledger.with_name(f"{folder.ledger.name}-wal")
    for path in (folder.config, folder.metrics, folder.summary, folder.final / "provenance.json"):
        if path.is_file():
            yield path
    if folder.ledger.is_file() and not (log.is_file() and log.stat().st_size):  # otherwise the log is not copied yet
        yield folder.ledger
    yield from sorted((folder.root / "segments").glob("*.seg"))


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"num_bytes": file.tell(), "sha256": digest}
