"""Which position of the draw order the next group takes.

Owns: the port `Draws`, and `InOrder`, which takes one after the other. Refuses: rows, and choosing by what they gave
(controller/data/curriculum.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class SkippedDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A position that was passed over. rate: success rate of its row; num_tokens: mean length of the answers to it."""

    draw: int
    rate: float
    num_tokens: float


class Taken(NamedTuple):
    """A position, and those that were passed over on the way to it."""

    draw: int
    skipped: tuple[SkippedDraw, ...] = ()


class Draws(Protocol):
    """Pure: what it answers follows from the calls before."""

    @property
    def has_more(self) -> bool:
        """True while there is a position to take."""

    def take(self) -> Taken:
        """The next position. Only while `has_more`."""

    def ended(self, draw: int, rewards: Sequence[float], mean_tokens: float) -> None:
        """All answers to a position's row are in; the rewards of those that were scored."""


class InOrder:
    """All positions, one after the other."""

    def __init__(self, max_draws: int | None, first: int = 0) -> None:
        self._max_draws, self._next = max_draws, first

    @property
    def has_more(self) -> bool:
        """See Draws."""
        return self._max_draws is None or self._next < self._max_draws

    def take(self) -> Taken:
        """See Draws."""
        self._next += 1
        return Taken(self._next - 1)

    def ended(self, draw: int, rewards: Sequence[float], mean_tokens: float) -> None:
        """Nothing depends on it."""
