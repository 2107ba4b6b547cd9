"""The file of verdicts that `areal-like score` writes, from which it also continues.

It handles existing verdicts, a half-written last line, and concurrent writers. Rows are in score_rows.py, scoring in
score_file.py.

Line k is the verdict on line k of the input. `scorer` contains scorer, version and options; `key` is a digest of that
and of the input line. Both must match when a file is continued, so a changed input or scorer is detected at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from areal_like.errors import UserError
from areal_like.verdict import Verdict
from services.reward.score_rows import Row

BEGINNING = b'{"id":'
START_AGAIN = "use a different --output, or --overwrite to start again"
_KINDS = ("scored", "timed_out", "crashed", "invalid")


@dataclass
class Totals:
    """Totals of the verdicts of a file. first_fault: the first one without a score, as `line 3: why`."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_KINDS, 0)))
    sum_value: float = 0.0
    first_fault: str = ""

    def add(self, number: int, verdict: str, value: float | None, reason: str) -> None:
        """Add one verdict."""
        self.counts[verdict] += 1
        if value is not None:
            self.sum_value += value
        elif not self.first_fault:
            self.first_fault = f"line {number}: {reason}"

    @property
    def num_rows(self) -> int:
        """Number of rows with a verdict."""
        return self.counts.total()

    @property
    def mean_value(self) -> float | None:
        """Mean over the rows that were scored; None if there is none."""
        return self.sum_value / self.counts["scored"] if self.counts["scored"] else None


def key_of(scorer: str, row: Row) -> str:
    """Digest of everything that a verdict depends on."""
    return hashlib.blake2b(f"{scorer}\n{row.digest}".encode(), digest_size=8).hexdigest()


def verdict_line(row: Row, verdict: Verdict, scorer: str) -> bytes:
    """One line of the output."""
    fields: dict[str, Any] = {
        "id": row.id,
        "verdict": verdict.kind,
        "value": verdict.value,
        "reason": verdict.reason,
        "wall_s": round(verdict.wall_s, 6),
        "components": verdict.components,
        "scorer": scorer,
        "key": key_of(scorer, row),
    }
    return json.dumps(fields).encode() + b"\n"


class VerdictFile:
    """The output, locked while it is open. Call `resume` first, then `append` in the order of rows."""

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        """Raises UserError if it cannot be written, or if another process writes it."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            remedy = "create the folder first" if isinstance(error, FileNotFoundError) else ""
            raise UserError(f"the file cannot be written ({error.strerror})", where=str(path), remedy=remedy) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if overwrite:
                os.ftruncate(self._fd, 0)
        except OSError as error:
            os.close(self._fd)
            what = "another process is writing this file" if isinstance(error, BlockingIOError) else str(error.strerror)
            raise UserError(what, where=str(path)) from error

    def __enter__(self) -> VerdictFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def resume(self, scorer: str, rows: Iterator[Row]) -> Totals:
        """Compare the existing verdicts with the rows, consuming one row for each verdict.

        A half-written last line is removed. Raises UserError if a verdict does not match its row.
        """
        totals, end_bytes = Totals(), 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not line.startswith(BEGINNING[: len(line)]):
                        raise self._foreign(number)
                    break
                record = self._read(number, line)
                row = next(rows, None)
                if row is None:
                    raise UserError(
                        f"the file has a verdict for line {number}, but the input has only {number - 1} lines",
                        where=str(self._path), remedy=START_AGAIN,
                    )  # fmt: skip
                self._check(number, record, scorer, row)
                totals.add(number, record["verdict"], record["value"], record["reason"])
                end_bytes += len(line)
        if os.fstat(self._fd).st_size != end_bytes:
            os.ftruncate(self._fd, end_bytes)
        return totals

    def append(self, line: bytes) -> None:
        """Write one whole line. Raises OSError; a half-written line is removed by the next `resume`."""
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
        is_verdict = (
            isinstance(record, dict)
            and all(isinstance(record.get(name), str) for name in ("verdict", "reason", "scorer", "key"))
            and record["verdict"] in _KINDS
            and _is_value(record["verdict"], record.get("value"))
        )
        if not is_verdict:
            raise self._foreign(number)
        assert isinstance(record, dict)
        return record

    def _check(self, number: int, record: dict[str, Any], scorer: str, row: Row) -> None:
        if record["scorer"] != scorer:
            raise UserError(
                f"line {number} was scored by {record['scorer']}, but the current scorer is {scorer}",
                where=str(self._path), remedy=f"use the same scorer and options, or {START_AGAIN}",
            )  # fmt: skip
        if record["key"] != key_of(scorer, row):
            raise UserError(
                f"line {number} does not match line {number} of the input, so the input has changed",
                where=str(self._path), remedy=START_AGAIN,
            )  # fmt: skip

    def _foreign(self, number: int) -> UserError:
        what = f"the file already exists, and line {number} is not a verdict of this command"
        return UserError(what, where=str(self._path), remedy=START_AGAIN)


def _is_value(verdict: str, value: Any) -> bool:
    if verdict != "scored":
        return value is None
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
