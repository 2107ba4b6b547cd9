"""MinHash sketches of texts: keys under which similar texts meet, and what the exact comparison needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

from controller.preflight.dataset.libraries import library
from controller.preflight.dataset.text import numbers, shingles, tokens

SHINGLE = 3
"""Number of tokens in a run."""
NUM_BANDS, BAND_ROWS = 32, 3
"""Two texts of similarity s share a band with probability 1 - (1 - s^3)^32: 0.9996 at 0.6, 0.98 at 0.5."""
SEED = 1


@dataclass(frozen=True)
class Sketch:
    """bands: one key for each band [32]; runs: sorted 32-bit hashes of all runs of tokens, as bytes."""

    bands: tuple[int, ...]
    runs: bytes

    def similarity(self, other: bytes) -> float:
        """Exact Jaccard similarity to the text with these runs."""
        mine, others = set(array("I", self.runs)), set(array("I", other))
        return len(mine & others) / len(mine | others)


class Sketcher:
    """Makes sketches. with_numbers: texts with different numbers share no key. Raises UserError without the library."""

    def __init__(self, *, with_numbers: bool) -> None:
        self._rensa: Any = library("rensa")
        self._with_numbers = with_numbers

    def sketch(self, parts: Sequence[str], answer: str = "") -> Sketch | None:
        """The sketch of a text of these tokens, or None if it has none. Texts with different answers share no key."""
        if not parts:
            return None
        signature, runs = _signature(tuple(parts))
        common = numbers(parts) if self._with_numbers else ()
        salt = crc32("\0".join((*common, "", *tokens(answer))).encode("utf-8", "surrogatepass"))
        # The hash of a tuple of integers is 64-bit and the same in every process, unlike that of a text.
        bands = tuple(
            hash((salt, band, *signature[band * BAND_ROWS : (band + 1) * BAND_ROWS])) for band in range(NUM_BANDS)
        )
        return Sketch(bands, runs)


@lru_cache(maxsize=8)
def _signature(parts: tuple[str, ...]) -> tuple[tuple[int, ...], bytes]:
    """MinHash signature [96] and runs of a text; two stages of a row ask for the same."""
    runs = shingles(parts, SHINGLE)
    minhash = library("rensa").RMinHash(num_perm=NUM_BANDS * BAND_ROWS, seed=SEED)
    minhash.update(list(runs))
    hashes = sorted(crc32(run.encode("utf-8", "surrogatepass")) for run in runs)
    return tuple(minhash.digest()), array("I", hashes).tobytes()
