"""Quarantine of rows whose episodes hang repeatedly: they are not served for a time.

Verdicts and replays are in episode_scheduler.py, deadlines in pool.py and host.py.

A hang blocks its process, and all episodes in it, for `step_timeout_s`. The samples of a group, and the retries of
each, would hang one after the other, and again in every epoch. A successful episode of a row resets its count, so
occasional hangs quarantine no row. After a quarantine one more hang renews it.
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
"""Number of rows with hangs that are stored; for a further one, the row with the oldest hang is removed."""


class _Record:
    """num_hangs: number since the last success. until_s: end of its quarantine on the clock; 0: there is none."""

    def __init__(self) -> None:
        self.num_hangs, self.until_s = 0, 0.0


class Quarantine:
    """`hung` and `succeeded` report the ends of episodes; `reason` returns whether a row is served."""

    def __init__(self, settings: EnvironmentSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: monotonic seconds."""
        self._settings, self._clock = settings, clock
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        """Records by row, the one with the oldest hang first."""

    def hung(self, row: Mapping[str, Any]) -> bool:
        """Record a hang of an episode of this row. True if this starts a quarantine."""
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

    def succeeded(self, row: Mapping[str, Any]) -> None:
        """Record that an episode of this row ended without a failure."""
        if self._records:
            self._records.pop(_key(row), None)

    def reason(self, row: Mapping[str, Any]) -> str:
        """Why an episode of this row must not start now; empty if it may."""
        record = self._records.get(_key(row)) if self._records else None
        if record is None or self._clock() >= record.until_s:
            return ""
        return (
            f"episodes of its row hung {record.num_hangs} times; the row is quarantined for "
            f"{self._settings.quarantine_s:g} s (reward.environment.quarantine_s)"
        )


def _key(row: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(row, order="deterministic"), digest_size=16).digest()
