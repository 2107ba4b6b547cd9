"""The file of one external model's answers, by the hash of their requests: for reuse, replay, and the sums of a budget.

JSON Lines, one answered request in a line:

    {"key": "9f..", "at": 1764288000.1, "model": "m", "tokens_in": 10, "tokens_out": 3, "cost": 0.0001, "seconds": 0.8,
     "request": {...}, "reply": {...}}

Several processes may append to a file: each writes a whole line under a lock (flock), and reads what the others have
appended since. A line that a crash left incomplete is skipped. The key of an endpoint is in a header, and headers are
not recorded.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_like.errors import add_file_name

FOLDER = "external"
"""Folder of a run with the files of its external models."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a line that is used. reply: as it was recorded; empty if only counts were."""

    key: str
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    reply: msgspec.Raw = msgspec.Raw()


@dataclass
class Totals:
    """Sums over the answered requests of a file."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of prompts and replies."""
        return self.tokens_in + self.tokens_out

    def as_dict(self) -> dict[str, float]:
        """For summaries; seconds are those of requests, which may run at the same time."""
        return {
            "requests": self.requests, "tokens_in": self.tokens_in, "tokens_out": self.tokens_out,
            "cost": round(self.cost, 6), "request_s": round(self.seconds, 1),
        }  # fmt: skip

    def add(self, line: Line) -> None:
        """Add one answered request."""
        self.requests += 1
        self.tokens_in += line.tokens_in
        self.tokens_out += line.tokens_out
        self.cost += line.cost
        self.seconds += line.seconds


_lines = msgspec.json.Decoder(Line)


class AnswerRecords:
    """One file. `path` None: sums of this process alone, and no answers."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.totals = Totals()
        self._read_bytes = 0
        self._places: dict[str, tuple[int, int]] = {}
        """Offset and length of the first line with each key that has a reply."""

    def refresh(self) -> Totals:
        """Read what was appended since the last call, and return the sums. Raises OSError."""
        if self.path is None or not self.path.exists():
            return self.totals
        with add_file_name(self.path), self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) <= self._read_bytes:
                return self.totals
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):  # being written, or left by a crash
                    break
                self._take(line)
        return self.totals

    def find(self, key: str) -> Any:
        """The recorded reply to a request, decoded; None if there is none. Call `refresh` before. Raises OSError."""
        place = self._places.get(key)
        if place is None or self.path is None:
            return None
        with add_file_name(self.path), self.path.open("rb") as file:
            file.seek(place[0])
            return msgspec.json.decode(_lines.decode(file.read(place[1])).reply)

    def add(
        self, key: str, *, model: str, tokens_in: int, tokens_out: int, cost: float, seconds: float, request: Any,
        reply: Any,
    ) -> None:  # fmt: skip
        """Append an answered request. request, reply: None if texts are not recorded. Raises OSError."""
        if self.path is None:
            self.totals.add(Line(key=key, tokens_in=tokens_in, tokens_out=tokens_out, cost=cost, seconds=seconds))
            return
        fields: dict[str, Any] = {
            "key": key, "at": round(time.time(), 3), "model": model, "tokens_in": tokens_in, "tokens_out": tokens_out,
            "cost": cost, "seconds": round(seconds, 3),
        }  # fmt: skip
        if reply is not None:
            fields |= {"request": request, "reply": reply}
        line = msgspec.json.encode(fields) + b"\n"
        with add_file_name(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    line = b"\n" + line
                _write(fd, line)
            finally:
                os.close(fd)
        self.refresh()

    def _take(self, line: bytes) -> None:
        start, self._read_bytes = self._read_bytes, self._read_bytes + len(line)
        try:
            found = _lines.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        self.totals.add(found)
        if len(found.reply):
            self._places.setdefault(found.key, (start, len(line)))


def _write(fd: int, line: bytes) -> None:
    view = memoryview(line)
    while len(view):
        view = view[os.write(fd, view) :]


def totals_of(folder: Path) -> dict[str, Totals]:
    """Sums of each file in a run's folder `external`, by name. Files that cannot be read are left out."""
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            found[path.stem] = AnswerRecords(path).refresh()
        except OSError:
            continue
    return found


def records_file(folder: Path, name: str) -> Path:
    """File of the model `name` in a run's folder."""
    return folder / FOLDER / f"{name.replace('/', '-').replace('#', '-')}.jsonl"
