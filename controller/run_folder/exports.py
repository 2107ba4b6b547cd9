"""exports.jsonl: the folders that models of a run were exported to by `areal-like export`, which may be anywhere.

Read by `areal-like lineage`. The final model is not listed: it is in the run's folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

EXPORTS_FILE = "exports.jsonl"


def record_export(root: Path, *, path: Path, version: int, lineage: str, checkpoint: str, repository: str = "") -> None:
    """Append an exported folder. checkpoint: SHA-256 of its checkpoint's manifest; repository: of the hub. Raises
    OSError."""
    entry = {
        "path": str(path), "version": version, "lineage": lineage, "checkpoint": checkpoint, "time_s": time.time(),
    } | ({"repository": repository} if repository else {})  # fmt: skip
    with (root / EXPORTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def read_exports(root: Path) -> list[dict[str, Any]]:
    """The recorded folders, oldest first; a damaged line is left out. Raises OSError."""
    try:
        lines = (root / EXPORTS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            entry = {**entry, "version": int(entry["version"]), **{name: str(entry[name]) for name in _TEXTS}}
        except (ValueError, KeyError, TypeError):
            continue
        found.append(entry)
    return found


_TEXTS = ("path", "lineage", "checkpoint")
