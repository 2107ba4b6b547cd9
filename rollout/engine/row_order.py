"""In which order answers are stored in the cache's rows, and which of them a decode step attends together.

Owns: blocks of rows with a span each, the moves that bring rows into order. Refuses: tensors, requests, doing the
moves.

One call of attention over many rows reads as many keys of each as the longest has. Lengths of answers have a long tail,
so most of what it reads would be padding. Rows are attended in blocks instead, each with a span of its own. That pays
where rows of like lengths lie together: the longest first. Every row grows by a token a step, so the order stays; only
answers that come or end disturb it, and it is restored when what that costs in a few steps is more than the moves.

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
COPY_COST = 2
"""Keys that are read in the time in which one is copied away and back."""
ONE_BLOCK = 1 << 62
"""For `call_tokens`: no padding costs as much as a call."""


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

    call_tokens: padding that costs as much as one more block. From the last row on, rows join a block until the padding
    that it holds would be more than that.
    """
    spans_B = np.maximum.accumulate(spans_of(lengths_B, max_context)[::-1])[::-1]  # of each and all behind it
    starts = [0, *(np.flatnonzero(spans_B[1:] != spans_B[:-1]) + 1).tolist()]
    spans = spans_B[starts].tolist()
    blocks: list[Block] = []
    stop, padding = len(spans_B), 0
    for place in range(len(starts) - 1, 0, -1):
        start, span, next_span = starts[place], spans[place], spans[place - 1]
        padding += (stop - start) * (next_span - span)
        if padding >= call_tokens:
            blocks.append(Block(start, stop, span))
            stop, padding = start, 0
    return [Block(0, stop, spans[0]), *reversed(blocks)]


def cost_of(blocks: list[Block], call_tokens: int) -> int:
    """Of attending them, in keys that are read, padding included."""
    return sum((block.stop - block.start) * block.span for block in blocks) + (len(blocks) - 1) * call_tokens


def order_of(lengths_B: np.ndarray, max_context: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, the rows they go to): a permutation that brings the longest to the front, as far as spans tell.

    Where all that are in a wrong place have more than `max_tokens` tokens: the longest of them and those in whose
    places they belong, as many as have no more, but two at least; calls after one another come to the whole order.
    """
    spans_B = spans_of(lengths_B, max_context)
    wrong = np.flatnonzero(spans_B != np.sort(spans_B)[::-1])
    sources = wrong[np.argsort(-lengths_B[wrong], kind="stable")]
    if lengths_B[wrong].sum() > max_tokens:
        most = np.searchsorted(np.cumsum(lengths_B[wrong] + lengths_B[sources]), max_tokens, side="right")
        wrong = np.union1d(wrong[: max(1, most)], sources[: max(1, most)])
        sources = wrong[np.argsort(-lengths_B[wrong], kind="stable")]
    is_moved = sources != wrong
    return sources[is_moved], wrong[is_moved]


def moves_that_pay(
    lengths_B: np.ndarray, cost: Callable[[np.ndarray], int], max_context: int, max_tokens: int
) -> tuple[list[int], list[int]] | None:
    """`order_of`, if it spares more until the next look than it costs. cost: of a step with rows of these lengths."""
    sources, targets = order_of(lengths_B, max_context, max_tokens)
    if not len(sources):
        return None
    ordered_B = lengths_B.copy()
    ordered_B[targets] = lengths_B[sources]
    spared = cost(lengths_B) - cost(ordered_B)
    pays = LOOK_EVERY * spared > COPY_COST * int(lengths_B[sources].sum())
    return (sources.tolist(), targets.tolist()) if pays else None
