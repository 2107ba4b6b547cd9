"""Putting a finished page or picture in its place: whole or not at all.

Owns: atomic replacement, the user's words for a folder that cannot be written to. Refuses: contents.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from areal_like.errors import UserError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a file alongside `path`, which then takes its place. Raises UserError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        write(fresh)
        fresh.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror or error})",
            where=str(path),
            remedy="make room, or name another folder",
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """The folder and those above it. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot be made ({error.strerror or error})", where=str(path), remedy="name another folder"
        ) from error
