"""Sources (`data.train`, `data.mix.0`, ...) of drawn and of trained groups, to detect whether losses select by source.

Counts groups by source and fate when they end; lengths are counted in sample_lengths.py. Groups that a filter removed
are left out of the comparison: a filter selects on purpose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from controller.coordinator.effects import DropGroup, Effect, FilterGroup, RecordBatch, RecordGroup
from controller.coordinator.snapshot import GroupRecord

TRAINED, FILTERED, LOST = "trained", "filtered", "lost"


class SampleSources:
    """Groups of one run by source and fate. Processes effects in order, as SampleLengths does."""

    def __init__(self, source_of: Callable[[int], str]) -> None:
        """source_of: the source of a position in the draw order."""
        self._source_of = source_of
        self._counts: dict[str, Counter[str]] = {fate: Counter() for fate in (TRAINED, FILTERED, LOST)}
        self._draws: dict[int, int] = {}
        """Position in the draw order of each live group."""

    def restore(self, ended: Iterable[tuple[str, int]], live: Iterable[GroupRecord]) -> None:
        """Restore the counts from an earlier session's ledger.

        ended: fate, as in the ledger, and position in the draw order of each ended group.
        """
        fates = {"consumed": TRAINED, "filtered": FILTERED}
        for fate, draw in ended:
            self._counts[fates.get(fate, LOST)][self._source_of(draw)] += 1
        for group in live:
            self._draws[group.group_id] = group.group_id if group.draw is None else group.draw

    def record(self, effect: Effect) -> None:
        """Process one effect of the coordinator."""
        match effect:
            case RecordGroup():
                self._draws[effect.group_id] = effect.group_id if effect.draw is None else effect.draw
            case DropGroup():
                self._end(effect.group_id, LOST)
            case FilterGroup():
                self._end(effect.group_id, FILTERED)
            case RecordBatch(is_replay=False):
                for group in effect.groups:
                    self._end(group.group_id, TRAINED)
            case _:
                pass

    def _end(self, group_id: int, fate: str) -> None:
        if (draw := self._draws.pop(group_id, None)) is not None:
            self._counts[fate][self._source_of(draw)] += 1

    def summary(self) -> dict[str, Any]:
        """Groups by source: `drawn` (all that have ended), `trained`, `filtered`, `lost`, and by source `shift_z`.

        shift_z: difference of the trained groups of a source from what losses that do not depend on the source would
        leave, in standard errors (hypergeometric). Empty if nothing was trained.
        """
        trained, lost = self._counts[TRAINED], self._counts[LOST]
        if not trained:
            return {}
        drawn = trained + lost + self._counts[FILTERED]
        found = {"drawn": drawn, **{fate: counts for fate, counts in self._counts.items() if counts}}
        return {
            **{name: dict(sorted(counts.items())) for name, counts in found.items()},
            "shift_z": {source: round(shift_z(trained, lost, source), 1) for source in sorted(drawn)},
        }


def shift_z(trained: Counter[str], lost: Counter[str], source: str) -> float:
    """Standard errors by which the trained groups of a source differ from a random choice among trained and lost ones.

    Example:
        >>> round(shift_z(Counter(a=50, b=50), Counter(a=50), "a"), 2)
        -6.12
    """
    total, num_trained = trained.total() + lost.total(), trained.total()
    share = (trained[source] + lost[source]) / total
    variance = num_trained * share * (1 - share) * lost.total() / max(1, total - 1)
    return (trained[source] - num_trained * share) / math.sqrt(variance) if variance > 0 else 0.0
