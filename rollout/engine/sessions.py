"""Keys and values of conversations between their turns, within a budget of bytes.

The least recently used conversation is removed first. Keys and values are copied in decoder.py and kv_cache.py; core.py
decides when they are outdated.

A conversation's entry contains the tokens whose keys and values it has. A later request may continue them, or branch
off at any of them: the longest common prefix is used.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KeptRow:
    """Copied keys and values of `tokens`; `row` is the decoder's own object."""

    tokens: np.ndarray
    row: Any
    num_bytes: int


SessionKey = tuple[int, int]
"""A conversation of one adapter: session key of the requests, number of the adapter or BASE. Keys and values of one
adapter are wrong for another."""


class Sessions:
    """Kept rows by session key, the least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        """Number of entries that were removed for lack of room."""
        self._kept: OrderedDict[SessionKey, KeptRow] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def make_room(self, key: SessionKey, num_bytes: int) -> bool:
        """Make room for an entry of `num_bytes` under `key`, by removing its current entry and as many others as
        necessary. Returns whether it fits."""
        self.forget(key)
        if num_bytes > self.max_bytes:
            return False
        while self.num_bytes + num_bytes > self.max_bytes:
            self.forget(next(iter(self._kept)))
            self.num_evicted += 1
        return True

    def keep(self, key: SessionKey, kept: KeptRow) -> None:
        """Store an entry for which `make_room` has made room."""
        self._kept[key] = kept
        self.num_bytes += kept.num_bytes

    def take(self, key: SessionKey, tokens: np.ndarray) -> tuple[KeptRow, int] | None:
        """Remove and return the entry of `key`, and the length of its common prefix with `tokens`.

        None if there is no entry, or no common prefix.
        """
        kept = self.forget(key)
        if kept is None:
            return None
        length = min(len(kept.tokens), len(tokens))
        differs = np.flatnonzero(kept.tokens[:length] != tokens[:length])
        num_common = int(differs[0]) if len(differs) else length
        return (kept, num_common) if num_common else None

    def forget(self, key: SessionKey) -> KeptRow | None:
        """Remove the entry of `key`, if there is one."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
        return kept

    def end(self, session_key: int) -> None:
        """Remove the entries of a conversation, of all adapters."""
        for key in [key for key in self._kept if key[0] == session_key]:
            self.forget(key)

    def clear(self) -> None:
        """Remove all entries."""
        self._kept.clear()
        self.num_bytes = 0
