"""Stop strings: text that ends an answer, wherever the borders of its tokens are (`sampling.stop`).

Finds the token that completes a stop string. The engines end the answer.

Legend: R tokens of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class StopStrings:
    """Finds stop strings in an answer's decoded text.

    A string of N bytes is written by N tokens at most, since no token that adds text adds less than a byte. Only so
    many tokens, and one before them, are decoded for each new one.

    Example:
        >>> stops = StopStrings(["##"], lambda tokens_R: "".join(map(chr, tokens_R)))
        >>> stops.end(np.array([97, 35, 35, 98]), 0)
        3
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[np.ndarray], str]) -> None:
        """decode: text of tokens, special tokens included."""
        self._strings, self._decode = tuple(strings), decode
        self.num_tokens = max(len(one.encode()) for one in self._strings) + 1
        """Tokens that one match needs at most."""

    def end(self, tokens_R: np.ndarray, start: int) -> int | None:
        """Length of the answer up to the first token from `start` on that completes a stop string, that token
        included; None: none does."""
        before = max(0, start + 1 - self.num_tokens)
        if start >= len(tokens_R) or not self._is_in(tokens_R[before:]):
            return None
        for length in range(start + 1, len(tokens_R) + 1):
            if self._is_in(tokens_R[max(0, length - self.num_tokens) : length]):
                return length
        return None

    def is_end(self, tokens_R: np.ndarray) -> bool:
        """Whether the newest token completes one."""
        return self.end(tokens_R, max(0, len(tokens_R) - 1)) is not None

    def _is_in(self, tokens_R: np.ndarray) -> bool:
        text = self._decode(tokens_R)
        return any(one in text for one in self._strings)
