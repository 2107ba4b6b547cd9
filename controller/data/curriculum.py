"""Chooses rows by the earlier results of each row: `data.curriculum`.

`Curriculum` walks along the draw order and skips positions. The draw order is in table.py, the time of draws in the
coordinator, storage in the ledger.

A position is skipped with probability 1 - keep, where `keep` is that of the band of its row's success rate. The random
number of a position is a hash of data seed and position. The choice is therefore a function of the seed and of the
previous results, in their order.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from controller.config.curriculum_settings import CurriculumSettings
from controller.coordinator.draws import SkippedDraw, Taken


class RowOutcome(NamedTuple):
    """A finished group: its position, the rewards of its scored answers, their mean length in tokens."""

    draw: int
    rewards: Sequence[float]
    mean_tokens: float


class Curriculum:
    """See controller.coordinator.draws.Draws."""

    def __init__(
        self,
        settings: CurriculumSettings,
        *,
        row_of: Callable[[int], int],
        num_rows: int,
        seed: int,
        max_draws: int | None,
        first: int = 0,
        outcomes: Iterable[RowOutcome] = (),
    ) -> None:
        """row_of: the row of a position. first: the position after the last used one. outcomes: of the groups finished
        before, oldest first, from the ledger.
        """
        self._settings, self._row_of, self._num_rows, self._seed = settings, row_of, num_rows, seed
        self._max_draws, self._next = max_draws, first
        self._memory: dict[int, deque[tuple[float, float]]] = {}
        """Success rate and mean length of the newest groups, by row."""
        for outcome in outcomes:
            self.ended(*outcome)

    @property
    def has_more(self) -> bool:
        """See Draws."""
        return self._max_draws is None or self._next < self._max_draws

    def take(self) -> Taken:
        """See Draws. After a whole pass over the rows without a choice, and at the end of the data, a position is used
        in any case.
        """
        skipped: list[SkippedDraw] = []
        while True:
            draw, self._next = self._next, self._next + 1
            if not self.has_more or len(skipped) == self._num_rows - 1:
                return Taken(draw, tuple(skipped))
            skip = self._skip(draw)
            if skip is None:
                return Taken(draw, tuple(skipped))
            skipped.append(skip)

    def ended(self, draw: int, rewards: Sequence[float], mean_tokens: float) -> None:
        """See Draws."""
        rate = sum(reward >= self._settings.success_reward for reward in rewards) / len(rewards)
        memory = self._memory.setdefault(self._row_of(draw), deque(maxlen=self._settings.memory))
        memory.append((rate, mean_tokens))

    def _skip(self, draw: int) -> SkippedDraw | None:
        """The skipped position with its success rate and length; None if the position is used."""
        memory = self._memory.get(self._row_of(draw))
        if memory is None:
            return None
        rate = math.fsum(rate for rate, _ in memory) / len(memory)
        if _uniform(self._seed, draw) < self._settings.keep(rate):
            return None
        return SkippedDraw(draw=draw, rate=rate, num_tokens=math.fsum(tokens for _, tokens in memory) / len(memory))


def _uniform(seed: int, draw: int) -> float:
    """A number in [0, 1). Python seeds its generator with a hash of the text that is the same on every machine."""
    return random.Random(f"curriculum/{seed}/{draw}").random()
