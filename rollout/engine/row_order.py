"""In which order answers lie in the cache's rows, and which of them a decode step attends together.

Owns: blocks of rows with a span each, the moves that bring rows into order. Refuses: tensors, requests, doing the
moves.

One call of attention over many rows reads as many keys of each as the longest has. Lengths of answers have a long tail,
so most of what it reads would be padding. Rows are attended in blocks instead, each with a span of its own. That pays
where rows of like lengths lie together: the longest first. Every row grows by a token a step, so the order stays; only
answers that come or end disturb it, and it is mended when what that costs in a few steps is more than the moves.

Legend: B rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SPAN_TOKENS = 16
"""A span is a multiple of this."""
LOOK_EVERY = 8
"""Decode steps from one look at the order to the next, and over which moves must pay."""


class Block(NamedTuple):
    """Rows start..stop-1 are attended over their first `span` positions."""

    start: int
    stop: int
    span: int


def spans_of(lengths_B: np.ndarray, max_context: int) -> np.ndarray:
    """Lengths, rounded up."""
    return np.minimum(-(-lengths_B // SPAN_TOKENS) * SPAN_TOKENS, max_context)


def blocks_of(lengths_B: np.ndarray, max_context: int, call_tokens: int) -> list[Block]:
    """Blocks that cover rows of these lengths in this order; a row that lies before longer ones is attended like them.

    call_tokens: padding that costs as much as one more block. Merges from the shortest on, where a cut spares less.
    """
    spans_B = np.maximum.accumulate(spans_of(lengths_B, max_context)[::-1])[::-1]  # of each and all behind it
    starts = [0, *(np.flatnonzero(spans_B[1:] != spans_B[:-1]) + 1).tolist()]
    blocks: list[Block] = []
    start, stop = starts[-1], len(spans_B)
    for before in reversed(starts[:-1]):
        if (stop - start) * int(spans_B[before] - spans_B[start]) >= call_tokens:
            blocks.append(Block(start, stop, int(spans_B[start])))
            stop = start
        start = before
    return [Block(start, stop, int(spans_B[start])), *reversed(blocks)]


def tokens_read(blocks: list[Block]) -> int:
    """Keys that a step reads, padding included."""
    return sum((block.stop - block.start) * block.span for block in blocks)


def order_of(lengths_B: np.ndarray, max_context: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, the rows they go to): a permutation after which the longest lie first, as far as spans tell.

    Of rows that lie where another span belongs, in order of rows, as many as have `max_tokens` tokens.
    """
    spans_B = spans_of(lengths_B, max_context)
    targets = np.flatnonzero(spans_B != np.sort(spans_B)[::-1])
    targets = targets[: np.searchsorted(np.cumsum(lengths_B[targets]), max_tokens, side="right")]
    sources = targets[np.argsort(-lengths_B[targets], kind="stable")]
    is_moved = sources != targets
    return sources[is_moved], targets[is_moved]


def moves_that_pay(
    lengths_B: np.ndarray, blocks: Callable[[np.ndarray], list[Block]], max_context: int, max_tokens: int
) -> tuple[list[int], list[int]] | None:
    """`order_of`, if until the next look it spares reading more tokens than it copies; blocks: those of an order."""
    read = tokens_read(blocks(lengths_B))
    if read - int(lengths_B.sum()) <= len(lengths_B) * SPAN_TOKENS:  # rounding alone costs half of it
        return None
    sources, targets = order_of(lengths_B, max_context, max_tokens)
    ordered_B = lengths_B.copy()
    ordered_B[targets] = lengths_B[sources]
    spared = read - tokens_read(blocks(ordered_B))
    pays = LOOK_EVERY * spared > int(lengths_B[sources].sum())
    return (sources.tolist(), targets.tolist()) if pays else None
