"""The folder of a cleaned set: rows, removed rows, manifest and card.

It is written under a temporary name next to its place and renamed when it is complete, so that a set exists completely
or not at all. An existing folder or file is never replaced. A temporary folder that a killed command left is removed by
the next command for the same place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from areal_like.errors import OperationError, UserError, add_file_name
from areal_like.store_owner import OWNER_FILE, claim, sweep_dead
from controller.data.origins import ORIGINS, ROWS
from controller.preflight.dataset.passing import Outcome

REMOVED = "removed.jsonl"
MAX_RAW_BYTES = 10_000
"""Number of bytes of an unreadable line that are kept."""


class HashedFile:
    """A file that is written once, with its hash and size."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("xb")
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, line: bytes) -> None:
        """Write a line and a line break. Raises OSError with the file's name."""
        with add_file_name(self._path):
            self._file.write(line + b"\n")
        self._hash.update(line + b"\n")
        self.num_bytes += len(line) + 1

    def close(self) -> dict[str, Any]:
        """Write everything to disk; returns size and hash."""
        with add_file_name(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}


class OutputFolder:
    """The folder while it is written. Use it as a context: it is removed unless `finish` was called."""

    def __init__(self, target: Path) -> None:
        """Raises UserError if the target exists or its folder does not."""
        self._target = target
        refuse_existing(target)
        parent = target.absolute().parent
        if not parent.is_dir():
            raise UserError(f"the folder {parent} does not exist", where=str(target), remedy="create the folder first")
        prefix = f".{target.name}.partial-"
        try:
            sweep_dead(parent, prefix)
            self._folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            claim(self._folder)
        except OSError as error:
            raise UserError(
                f"no files can be created in this folder ({error.strerror})",
                where=str(parent),
                remedy="check the permissions and the free space of the folder",
            ) from error
        self._rows, self._removed = HashedFile(self._folder / ROWS), HashedFile(self._folder / REMOVED)
        self._origins = HashedFile(self._folder / ORIGINS)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, outcome: Outcome, kind: str) -> None:
        """Write a row to the kept or the removed ones, a kept one with unchanged bytes. kind: of the stage that removed
        it."""
        if outcome.finding is None:
            assert outcome.line.text is not None
            self._rows.write(outcome.line.text.strip())
            self._origins.write(json.dumps(outcome.row.where).encode())
            return
        row = outcome.row
        record: dict[str, Any] = {
            "where": row.where, "stage": kind, "reason": outcome.finding.reason, "evidence": outcome.finding.evidence,
        }  # fmt: skip
        if row.fault:
            text = outcome.line.text or b""
            record["raw_base64"] = base64.b64encode(text[:MAX_RAW_BYTES]).decode()
        else:
            record["row"] = row.fields
        self._removed.write(json.dumps(record).encode())

    def close_rows(self) -> dict[str, dict[str, Any]]:
        """Close the files of rows and origins; returns `bytes` and `sha256` of each."""
        return {ROWS: self._rows.close(), REMOVED: self._removed.close(), ORIGINS: self._origins.close()}

    def finish(self, pages: dict[str, str]) -> None:
        """Write pages by name, and move the folder to its place. Raises UserError, OperationError, OSError."""
        for name, text in pages.items():
            (self._folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        (self._folder / OWNER_FILE).unlink()
        self._folder.chmod(0o777 & ~_umask())
        refuse_existing(self._target)
        try:
            os.rename(self._folder, self._target)
        except OSError as error:
            raise OperationError(f"{self._target} cannot be created ({error.strerror})") from error


def refuse_existing(target: Path) -> None:
    """Raise UserError if something is at this path."""
    if os.path.lexists(target):
        remedy = "choose a different name, or remove the existing folder first; nothing is overwritten"
        raise UserError("already exists", where=str(target), remedy=remedy)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
