"""Writes pages and pictures atomically, and converts errors of the file system to user errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from areal_like.errors import UserError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file next to `path`, then replace `path` by it. Raises UserError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        write(fresh)
        fresh.replace(path)
    except OSError as error:
        raise UserError(
            f"the file cannot be written ({error.strerror or error})",
            where=str(path),
            remedy="free some disk space, or choose a different folder",
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create the folder and its parents. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be created ({error.strerror or error})",
            where=str(path),
            remedy="choose a different folder",
        ) from error
