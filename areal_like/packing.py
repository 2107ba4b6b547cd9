"""Assigns sequences to micro-batches under a token budget, and to balanced shares."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, min_bins: int = 1) -> list[list[int]]:
    """Distribute sequences to micro-batches under a token budget (arXiv 2505.24298, Algorithm 1).

    Longest first: open a new bin while fewer than `min_bins` exist or none has room, else take the bin with room that
    holds the fewest sequences (the oldest of those).

    Args:
        lengths: tokens of each sequence.
        capacity: largest number of tokens of one bin.
        min_bins: smallest number of bins, if there are as many sequences.

    Returns:
        Indices of `lengths`, by bin. Every bin is non-empty, its indices ascend.

    Raises:
        ValueError: a length is not positive or exceeds `capacity`.

    Example:
        >>> pack([3, 5, 2, 4], capacity=8)
        [[0, 1], [2, 3]]
    """
    if capacity < 1 or min_bins < 1:
        raise ValueError(f"capacity ({capacity}) and min_bins ({min_bins}) must be at least 1")
    _check_lengths(lengths)
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit in a micro-batch of {capacity} tokens")
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        roomy = [b for b, load in enumerate(loads) if load + length <= capacity] if len(bins) >= min_bins else []
        if roomy:
            chosen = min(roomy, key=lambda b: len(bins[b]))
            bins[chosen].append(index)
            loads[chosen] += length
        else:
            bins.append([index])
            loads.append(length)
    return [sorted(members) for members in bins]


def partition(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Distribute sequences to shares of nearly equal sums (longest processing time first).

    The heaviest share is at most 4/3 of the best possible one, and shares differ by at most the longest length.

    Args:
        lengths: tokens of each sequence.
        num_bins: number of shares, such as the trainer's ranks.

    Returns:
        Indices of `lengths`, by share; indices of a share ascend. No share is empty if there are at least `num_bins`
            sequences.

    Raises:
        ValueError: a length is not positive, or `num_bins` is below 1.

    Example:
        >>> partition([3, 5, 2, 4], num_bins=2)
        [[1, 2], [0, 3]]
    """
    if num_bins < 1:
        raise ValueError(f"num_bins ({num_bins}) must be at least 1")
    _check_lengths(lengths)
    shares: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for index in _longest_first(lengths):
        load, lightest = loads[0]
        shares[lightest].append(index)
        heapq.heapreplace(loads, (load + lengths[index], lightest))
    return [sorted(members) for members in shares]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _check_lengths(lengths: Sequence[int]) -> None:
    if any(length < 1 for length in lengths):
        raise ValueError("every length must be at least 1")
