"""metrics.jsonl, the record of a run that is always written, and its listeners (sinks).

Adds kind and time_s to every row, keeps the newest step row, and passes rows on. Sinks are in sinks.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal_like.encryption.texts import Texts
from areal_like.metrics import JsonlLog


class Listener(Protocol):
    """Receives rows without blocking."""

    def offer(self, record: Mapping[str, Any]) -> None: ...


class Journal:
    """Appends rows to metrics.jsonl; each is written to the operating system before listeners receive it."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._log, self._wall_clock = JsonlLog(path), wall_clock
        self._listeners: list[Listener] = []
        self.last_step = newest_row(path, "step")
        """The newest step row, including earlier sessions; None before the first."""

    def listen(self, listener: Listener) -> None:
        """Pass every further row to `listener` as well."""
        self._listeners.append(listener)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one row unchanged."""
        self._log.append(record)
        if record["kind"] == "step":
            self.last_step = dict(record)
        for listener in self._listeners:
            listener.offer(record)

    def measure(self, kind: str, **facts: Any) -> None:
        """Append one row of these facts."""
        self.append({"kind": kind, "time_s": self._wall_clock(), **facts})

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def newest_row(path: Path, kind: str) -> dict[str, Any] | None:
    """The last row of this kind in a JSON Lines file, read line by line; None if there is none."""
    found = None
    for row in rows_of(path, kind):
        found = row
    return found


def rows_of(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Rows of these kinds in a JSON Lines file, read line by line; none if there is no file."""
    marks, texts = [f'"kind":"{kind}"'.encode() for kind in kinds], Texts.to_show(path)
    try:
        with path.open("rb") as lines:
            for line in lines:
                if any(mark in line for mark in marks):
                    with contextlib.suppress(msgspec.DecodeError):  # truncated by a crash
                        yield texts.opened_row(msgspec.json.decode(line, type=dict[str, Any]))
    except FileNotFoundError:
        return
