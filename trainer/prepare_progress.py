"""Writes the progress of preparing a starting model to a file that the controller reads.

It is displayed by controller/telemetry/progress.py. The rows are:

    {"num_bytes": 1000, "total_bytes": 4000, "seconds": 2.0}                 of a download; total null: not known
    {"step": 50, "num_steps": 300, "loss": 1.4, "seconds": 9.1}             of the supervised steps
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from areal_like.metrics import JsonlLog

DOWNLOAD_EVERY_S = 1.0


class PrepareProgress:
    """Writes the rows; without a path it does nothing. Call `close` at the end."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = JsonlLog(path) if path is not None else None, clock
        self._lock = threading.Lock()
        self._started_s: float | None = None
        self._row_s, self._num_bytes = 0.0, 0

    def downloaded(self, num_bytes: int, total_bytes: int | None) -> None:
        """Report downloaded bytes; at most one row per second, and one at the end. Called by several threads."""
        if self._log is None or num_bytes <= 0:
            return
        with self._lock:
            now_s = self._clock()
            if self._started_s is None:
                self._started_s = now_s
            is_due = now_s - self._row_s >= DOWNLOAD_EVERY_S or num_bytes == total_bytes
            if not is_due or num_bytes <= self._num_bytes:
                return
            self._row_s, self._num_bytes = now_s, num_bytes
            seconds = round(now_s - self._started_s, 3)
            self._log.append({"num_bytes": num_bytes, "total_bytes": total_bytes or None, "seconds": seconds})

    def stepped(self, step: int, num_steps: int, loss: float, seconds: float) -> None:
        """Report that supervised step `step` of `num_steps` is done, `seconds` after the start."""
        if self._log is not None:
            self._log.append({"step": step, "num_steps": num_steps, "loss": loss, "seconds": round(seconds, 3)})

    def close(self) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()


class _NullStream(StringIO):
    """Discards what a progress bar prints."""

    def write(self, text: str) -> int:
        return len(text)


def byte_counter(report: Callable[[int, int | None], None]) -> type:
    """Return a class that huggingface_hub uses as a progress bar: it prints nothing and reports bytes.

    The hub has two bars for bytes, downloaded over the network and written to files, and one for files.
    """
    from tqdm.auto import tqdm  # comes with huggingface_hub

    class ByteCounter(tqdm):
        def __init__(self, *args: Any, **more: Any) -> None:
            more.pop("name", None)
            super().__init__(*args, **{**more, "file": _NullStream(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B":
                report(int(self.n), int(self.total) if self.total else None)
            return shown

    return ByteCounter
