"""The starts of the trainer whose steps led to the last version of a run. Pure.

A trainer that died or was resumed starts from a checkpoint, so the history of the last version is a chain: the last
start, the start that saved the checkpoint it began with, and so on back to the starting model. Steps of other starts
were rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """Steps that one start of the trainer contributed: from `base` + 1 to `last`. base 0: the starting model."""

    lineage: str
    base: int
    last: int


def chain_of(starts: Sequence[tuple[str, int]], last_step: int) -> tuple[Start, ...]:
    """Return the starts that led to version `last_step`, in order.

    Args:
        starts: lineage and starting version of every start of the trainer, in the order in which they happened.
        last_step: the newest version.

    A start from version k continues the newest earlier one that began before k: it saved that checkpoint.

    Example:
        >>> [start.lineage for start in chain_of([("l0", 0), ("l1", 5), ("l2", 5)], 9)]
        ['l0', 'l2']
    """
    found: list[Start] = []
    end = last_step
    for lineage, base in reversed(starts):
        if base < end:
            found.append(Start(lineage, base, end))
            end = base
        if end == 0:
            break
    return tuple(reversed(found))


def part_of(chain: Sequence[Start], first: int, last: int) -> tuple[Start, ...]:
    """Return the starts that are needed to go from version `first` to version `last`.

    Example:
        >>> part_of([Start("l0", 0, 5), Start("l1", 5, 9)], 3, 9)
        (Start(lineage='l0', base=3, last=5), Start(lineage='l1', base=5, last=9))
    """
    cut = [Start(one.lineage, max(one.base, first), min(one.last, last)) for one in chain]
    return tuple(one for one in cut if one.base < one.last)
