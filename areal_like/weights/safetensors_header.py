"""Reads the header of a safetensors file: names, dtypes, shapes and places of its tensors. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_like.errors import UserError

_MAX_HEADER_BYTES = 100_000_000


def read_header(file: Path) -> dict[str, Any]:
    """The header, with `__metadata__` if there is any. Raises UserError if the file is not complete, OSError if it
    cannot be opened."""

    def damaged(why: str) -> UserError:
        what = f"the file is not a complete safetensors file ({why})"
        return UserError(what, where=str(file), remedy="download or copy the file again")

    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise damaged("its header is missing" if size else "it is empty")
        try:
            header = json.loads(opened.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (
            ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise damaged("its header cannot be read") from error
    if max(ends, default=0) != size - 8 - length:
        raise damaged(f"its header describes {max(ends, default=0)} bytes, but the file has {size - 8 - length}")
    found: dict[str, Any] = header
    return found


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the file's tensors by name. Raises as `read_header`."""
    return {
        name: tuple(int(size) for size in entry["shape"])
        for name, entry in read_header(file).items()
        if name != "__metadata__"
    }
