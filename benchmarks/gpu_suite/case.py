"""The context of a part of the suite, and how its cases end: every case becomes a row, even if it fails.

Contains `Context` with its deadline, `Skip`, and the fault boundary around a case.

A row is a flat mapping with `table` (the table it belongs to), `case` and `status`: `ok`, `failed` (an error, or a
value beyond its tolerance), `skipped` (with the reason) or `cut` (no time left).
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Flat, with JSON types only."""


class Skip(Exception):
    """The case cannot run here; the message says why. Not a failure."""


class Cut(Exception):
    """The case ran out of its part's time; the message says where. Not a failure."""


class Beyond(Exception):
    """A measured value is beyond its tolerance. `values` are kept in the row."""

    def __init__(self, reason: str, values: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.values = dict(values)


@dataclass(frozen=True)
class Context:
    """The context of a part. `device`: cpu or cuda:0. `is_tiny`: shapes of the self-check."""

    device: str
    is_quick: bool
    is_tiny: bool
    scratch: Path
    shared_memory: Path
    """Folder for published weights; removed afterwards, like `scratch`."""
    deadline_s: float
    """On the monotonic clock."""
    write: Callable[[Row], None]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_s - time.monotonic()

    def run(self, table: str, case: str, needs_s: float, work: Callable[[], Mapping[str, Any]]) -> Row:
        """Run one case, unless less than `needs_s` is left, and write its row. Never raises an error of `work`."""
        row: Row = {"table": table, "case": case}
        if self.left_s < needs_s:
            row |= {"status": "cut", "reason": f"{max(self.left_s, 0):.0f} s left, about {needs_s:.0f} s needed"}
        else:
            row |= self._outcome(work)
        self._tidy()
        self.write(row)
        return row

    def section(self, table: str, case: str, work: Callable[[], None]) -> None:
        """Prepare and run several cases; a row is written only if the preparation fails."""

        def whole() -> Row:
            work()
            return {}

        outcome = self._outcome(whole)
        self._tidy()
        if outcome["status"] != "ok":
            self.write({"table": table, "case": case, **outcome})

    def _outcome(self, work: Callable[[], Mapping[str, Any]]) -> Row:
        try:
            return {"status": "ok", **work()}
        except Skip as skip:
            return {"status": "skipped", "reason": str(skip)}
        except Cut as cut:
            return {"status": "cut", "reason": str(cut)}
        except Beyond as beyond:
            return {"status": "failed", **beyond.values, "reason": str(beyond)}
        except Exception as error:  # the fault boundary of a case: its error is a row, the next case goes on
            words = " ".join(str(error).split())[:300]
            if type(error).__name__ == "OutOfMemoryError":  # torch's; a small GPU is not a failure
                return {"status": "skipped", "reason": f"out of memory ({words.partition('. ')[0]})"}
            traceback.print_exc()
            return {"status": "failed", "reason": f"{type(error).__name__}: {words}"}

    def _tidy(self) -> None:
        """Free memory between cases. An error of a broken device is only printed; the next case will fail."""
        gc.collect()
        if self.device.startswith("cuda"):
            import torch

            try:
                torch.cuda.empty_cache()
            except RuntimeError as error:
                print(f"empty_cache: {error}")
