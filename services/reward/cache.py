"""Cache of scores of exact duplicates: the same row, answer and scorer version.

It is not shared between processes and does not survive a restart, because a scorer's version does not cover the files
and models that it reads.

Only `scored` outcomes are stored, because a failure may not occur again. Samples of one group often have the same
answer, and a prompt occurs again in a later epoch. The least recently used entry is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection

import msgspec

from areal_like.wire.messages import ScoreRequest
from services.reward.job import Outcome

KEY_BYTES = 16
"""128 bits: among a billion answers the probability of a collision is about 10^-20."""
ENTRY_BYTES = 600
"""Memory of an entry in addition to its text: key, slot, outcome, value; measured with tracemalloc."""
ITEM_BYTES = 120
"""Memory of each component or time of a scorer."""


class ScoreCache:
    """Outcomes by key, with at most `max_bytes` in total."""

    def __init__(self, max_bytes: int, version: str, volatile: Collection[str]) -> None:
        """version: names and versions of all scorers; volatile: names of scorers whose scores must not be stored."""
        self._max_bytes, self._version, self._volatile = max_bytes, version, frozenset(volatile)
        self._kept: OrderedDict[bytes, Outcome] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder(order="deterministic")
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def key_of(self, request: ScoreRequest) -> bytes | None:
        """Key of everything that the score depends on; None if it must not be stored.

        Raises msgspec's exceptions for a row that cannot be encoded.
        """
        is_volatile = request.scorer in self._volatile if request.scorer else bool(self._volatile)
        if not self._max_bytes or is_volatile:
            return None
        facts = (
            self._version, request.scorer, request.row, request.response, request.finish_reason, request.num_tokens
        )  # fmt: skip
        return hashlib.blake2b(self._encoder.encode(facts), digest_size=KEY_BYTES).digest()

    def find(self, key: bytes) -> Outcome | None:
        """The stored score, or None."""
        outcome = self._kept.get(key)
        if outcome is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._kept.move_to_end(key)
        return outcome

    def keep(self, key: bytes, outcome: Outcome) -> None:
        """Store a score, and evict the least recently used ones to make room."""
        size = _size_of(outcome)
        if outcome.kind != "scored" or key in self._kept or size > self._max_bytes:
            return
        self._kept[key] = outcome
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size_of(self._kept.popitem(last=False)[1])

    def counters(self) -> dict[str, float]:
        """Numbers of hits and misses, and current entries and bytes."""
        return {
            "cache.hits": self.num_hits,
            "cache.misses": self.num_misses,
            "cache.entries": len(self._kept),
            "cache.bytes": self.num_bytes,
        }


def _size_of(outcome: Outcome) -> int:
    names = sum(map(len, outcome.components)) + sum(map(len, outcome.scorer_s))
    num_items = len(outcome.components) + len(outcome.scorer_s)
    return ENTRY_BYTES + ITEM_BYTES * num_items + 4 * (names + len(outcome.reason))
