"""The position of the draw order that the next group uses: the interface `Draws`, and `InOrder`, which uses all
positions in order.

A choice by earlier results is in controller/data/curriculum.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class SkippedDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A skipped position. rate: success rate of its row; num_tokens: mean length of the answers to it."""

    draw: int
    rate: float
    num_tokens: float


class Taken(NamedTuple):
    """A position, and the positions that were skipped before it."""

    draw: int
    skipped: tuple[SkippedDraw, ...] = ()


class Draws(Protocol):
    """Chooses positions. Pure: results depend only on earlier calls."""

    @property
    def has_more(self) -> bool:
        """Return whether a position is left."""

    def take(self) -> Taken:
        """Return the next position. Only while `has_more`."""

    def ended(self, draw: int, rewards: Sequence[float], mean_tokens: float) -> None:
        """Handle that all answers to a position's row are finished. Receives the rewards of the scored answers."""


class InOrder:
    """Uses all positions in order."""

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
        """Do nothing: the order does not depend on results."""
