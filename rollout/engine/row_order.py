"""The order of answers in the cache's rows, and the blocks of rows that a decode step attends together.

The moves themselves are made by the decoder.

One call of attention over many rows reads as many keys of each as the longest has. Lengths of answers have a long tail,
so most of what it reads would be padding. Rows are attended in blocks instead, each with its own span. That pays if
rows of similar lengths are adjacent, the longest first. Every row grows by one token per step, so the order stays
valid; only answers that start or end disturb it, and it is restored when that saves more in a few steps than the moves
cost.

Legend: B rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SPAN_TOKENS = 16
"""Spans are multiples of this."""
LOOK_EVERY = 8
"""Number of decode steps between two checks of the order, over which moves must pay."""
COPY_COST = 2
"""Number of keys that are read in the time of copying one out and back."""
ONE_BLOCK = 1 << 62
"""Value of `call_tokens` with which all rows are one block."""


class Block(NamedTuple):
    """Rows start..stop-1 are attended over their first `span` positions."""

    start: int
    stop: int
    span: int


def spans_of(lengths_B: np.ndarray, max_context: int) -> np.ndarray:
    """Lengths, rounded up."""
    return np.minimum(-(-lengths_B // SPAN_TOKENS) * SPAN_TOKENS, max_context)


def blocks_of(lengths_B: np.ndarray, max_context: int, call_tokens: int) -> list[Block]:
    """Blocks that cover rows of these lengths in this order; a row before longer ones is attended over their span.

    call_tokens: padding that costs as much as one more block. Starting at the last row, rows join a block until its
    padding would exceed that.
    """
    spans_B = np.maximum.accumulate(spans_of(lengths_B, max_context)[::-1])[
        ::-1
    ]  # maximum of each row and all after it
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
    """Cost of attending the blocks: number of keys that are read, including padding."""
    return sum((block.stop - block.start) * block.span for block in blocks) + (len(blocks) - 1) * call_tokens


def order_of(lengths_B: np.ndarray, max_context: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, target rows): a permutation that moves the longest rows to the front, ordered by span.

    If all misplaced rows together have more than `max_tokens` tokens, only as many of the longest as fit, with the rows
    whose places they take, but at least two; repeated calls reach the complete order.
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
    """The moves of `order_of`, if they save more until the next check than they cost. cost: function that returns the
    cost of a step with rows of these lengths."""
    sources, targets = order_of(lengths_B, max_context, max_tokens)
    if not len(sources):
        return None
    ordered_B = lengths_B.copy()
    ordered_B[targets] = lengths_B[sources]
    spared = cost(lengths_B) - cost(ordered_B)
    pays = LOOK_EVERY * spared > COPY_COST * int(lengths_B[sources].sum())
    return (sources.tolist(), targets.tolist()) if pays else None
