"""Scores of exact duplicates: the same row, answer and scorer version need not be scored twice.

Owns: the key, the bound in bytes, what may be kept. Refuses: sharing between processes, surviving a restart (a scorer's
version does not cover the files and models it reads).

Only `scored` outcomes are kept: a failure may be gone the next time. Samples of one group often end in the same answer,
and a prompt comes again in a later epoch; the least recently used goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection

import msgspec

from areal_like.wire.messages import ScoreRequest
from services.reward.job import Outcome

KEY_BYTES = 16
"""128 bits: among a billion answers two share a key with a chance of one in 10^20."""
ENTRY_BYTES = 600
"""What Python takes for an entry alongside the text in it: key, slot, outcome, value; measured with tracemalloc."""
ITEM_BYTES = 120
"""The same for each component or time of a scorer."""


class ScoreCache:
    """Outcomes by what they depend on, at most `max_bytes` of them."""

    def __init__(self, max_bytes: int, version: str, volatile: Collection[str]) -> None:
        """version: names and versions of all scorers; volatile: names of those whose scores may not be kept."""
        self._max_bytes, self._version, self._volatile = max_bytes, version, frozenset(volatile)
        self._kept: OrderedDict[bytes, Outcome] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder(order="deterministic")
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def key_of(self, request: ScoreRequest) -> bytes | None:
        """What the score depends on, as one key; None where it may not be kept.

        Raises what msgspec raises for a row that cannot be encoded.
        """
        is_volatile = request.scorer in self._volatile if request.scorer else bool(self._volatile)
        if not self._max_bytes or is_volatile:
            return None
        facts = (
            self._version, request.scorer, request.row, request.response, request.finish_reason, request.num_tokens
        )  # fmt: skip
        return hashlib.blake2b(self._encoder.encode(facts), digest_size=KEY_BYTES).digest()

    def find(self, key: bytes) -> Outcome | None:
        """The score that was given before."""
        outcome = self._kept.get(key)
        if outcome is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._kept.move_to_end(key)
        return outcome

    def keep(self, key: bytes, outcome: Outcome) -> None:
        """Remember a score; the least recently used make room for it."""
        size = _size_of(outcome)
        if outcome.kind != "scored" or key in self._kept or size > self._max_bytes:
            return
        self._kept[key] = outcome
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size_of(self._kept.popitem(last=False)[1])

    def counters(self) -> dict[str, float]:
        """Hits, misses, and what is held now."""
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
