"""Rows whose episodes hang again and again, and that are served no more for a time.

Owns: which rows those are, for how long, how many are remembered. Refuses: verdicts and replays (desk), deadlines
(pool, host).

A hang holds its process, and all episodes in it, for `step_timeout_s`. The samples of a group, and the retries of each,
would hang one after the other; so would the same row in every epoch. An episode of a row that ends well takes its hangs
back: a policy whose actions hang now and then has no row quarantined. After a quarantine one more hang renews it.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.environment.config import EnvironmentSettings

MAX_ROWS = 4096
"""Rows with hangs that are remembered; the one that hung longest ago is forgotten for one more."""


class _Record:
    """num_hangs: since an episode ended well. until_s: when its quarantine ends, on the clock; 0: there is none."""

    def __init__(self) -> None:
        self.num_hangs, self.until_s = 0, 0.0


class Quarantine:
    """`hung` and `ended_well` tell what became of episodes; `reason` says whether a row is served."""

    def __init__(self, settings: EnvironmentSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds that only rise."""
        self._settings, self._clock = settings, clock
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        """By row; the one that hung longest ago first."""

    def hung(self, row: Mapping[str, Any]) -> bool:
        """An episode of this row hung. True where the row goes into quarantine with that."""
        if not self._settings.max_hangs:
            return False
        key = _key(row)
        record = self._records.setdefault(key, _Record())
        self._records.move_to_end(key)
        while len(self._records) > MAX_ROWS:
            self._records.popitem(last=False)
        record.num_hangs += 1
        was_in = self._clock() < record.until_s
        if record.num_hangs < self._settings.max_hangs or was_in:
            return False
        record.until_s = self._clock() + self._settings.quarantine_s
        return True

    def ended_well(self, row: Mapping[str, Any]) -> None:
        """An episode of this row ended without a failure."""
        if self._records:
            self._records.pop(_key(row), None)

    def reason(self, row: Mapping[str, Any]) -> str:
        """Why an episode of this row is not begun now; empty: it is."""
        record = self._records.get(_key(row)) if self._records else None
        if record is None or self._clock() >= record.until_s:
            return ""
        return (
            f"episodes of its row hung {record.num_hangs} times; the row is quarantined for "
            f"{self._settings.quarantine_s:g} s (reward.environment.quarantine_s)"
        )


def _key(row: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(row, order="deterministic"), digest_size=16).digest()
