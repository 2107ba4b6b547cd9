"""RUN/restarts.jsonl: when and why `--keep-alive` resumed a run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from areal_like.encryption.texts import Texts
from areal_like.errors import UserError

RESTARTS_FILE = "restarts.jsonl"


def record_restart(root: Path, cause: str, step: int) -> None:
    """Append a line, in an encrypted run with an encrypted cause. It is not written on a full disk or without the key:
    the run is more important."""
    with contextlib.suppress(OSError, UserError):
        row = {"time_s": time.time(), "step": step, "cause": Texts.to_write(root).sealed("cause", cause)}
        file = os.open(root / RESTARTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(file, "ab") as lines:
            lines.write(json.dumps(row).encode() + b"\n")


def read_restarts(root: Path) -> list[dict[str, Any]]:
    """The restarts of a run, oldest first: `time_s`, `step` (finished steps) and `cause`. Skips damaged lines."""
    rows, texts = [], Texts.to_show(root)
    with contextlib.suppress(OSError):
        for line in (root / RESTARTS_FILE).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("cause"), str):
                    rows.append({**row, "cause": texts.opened("cause", row["cause"])})
    return rows
