"""metrics.jsonl, the always-on record of a run, and the sinks that listen to it.

Owns: what every row has (kind, time_s), the newest step row, handing rows on. Refuses: what a row says (its author's),
how a sink works (sinks.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal_like.metrics import JsonlLog


class Listener(Protocol):
    """Takes rows and never waits."""

    def offer(self, record: Mapping[str, Any]) -> None: ...


class Journal:
    """Appends rows to metrics.jsonl; each is with the operating system before a listener sees it."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._log, self._wall_clock = JsonlLog(path), wall_clock
        self._listeners: list[Listener] = []
        self.last_step = newest_row(path, "step")
        """The newest step row, also of an earlier session of the run; None before the first."""

    def listen(self, listener: Listener) -> None:
        """Hand every further row to `listener` as well."""
        self._listeners.append(listener)

    def append(self, record: Mapping[str, Any]) -> None:
        """One row as it is."""
        self._log.append(record)
        if record["kind"] == "step":
            self.last_step = dict(record)
        for listener in self._listeners:
            listener.offer(record)

    def measure(self, kind: str, **facts: Any) -> None:
        """One row of these facts."""
        self.append({"kind": kind, "time_s": self._wall_clock(), **facts})

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def newest_row(path: Path, kind: str) -> dict[str, Any] | None:
    """The last row of this kind in a JSON Lines file, read line by line; None when there is none."""
    mark, found = f'"kind":"{kind}"'.encode(), None
    try:
        with path.open("rb") as lines:
            for line in lines:
                if mark in line:
                    with contextlib.suppress(msgspec.DecodeError):  # cut by a crash
                        found = msgspec.json.decode(line, type=dict[str, Any])
    except FileNotFoundError:
        return None
    return found
