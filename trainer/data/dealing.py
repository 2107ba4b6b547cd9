"""Which rank trains on which sequences, and in which micro-batches.

Owns: `deal`, `deal_apart`, `micro_batches`. Refuses: tensors, groups and denominators: advantages and the loss are
settled over the whole batch before it is dealt, so that who computes a sequence changes nothing but who computes it.

Sequences are first dealt so that ranks hold nearly equal tokens, then each rank packs its own (arXiv 2505.24298,
Algorithm 1). Ranks meet in every forward and backward pass, so all get the same number of micro-batches; a rank that
has too few sequences for that gets empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.packing import pack, partition

SEARCH_NODES = 400
"""Combinations looked at, at most, to fill one micro-batch."""
MAX_SEARCHED = 4096
"""With more sequences on a rank than this, Algorithm 1 alone is close to the best."""
GRADIENT_PASSES = 3
"""Cost of a forward and a backward pass, in forward passes."""


def deal(lengths: Sequence[int], num_ranks: int, capacity: int) -> list[list[list[int]]]:
    """Indices of `lengths` as [rank][micro-batch][sequence]: every index once, each rank equally many micro-batches.

    Micro-batches hold at most `capacity` tokens, except that a longer sequence has one of its own. An empty
    micro-batch means that the rank only keeps the others company.
    """
    shares = partition(lengths, num_ranks)
    bins = [
        [[share[i] for i in members] for members in micro_batches([lengths[i] for i in share], capacity)]
        for share in shares
    ]
    num = max(len(found) for found in bins)
    return [_spread(found, num) for found in bins]


def deal_apart(
    lengths: Sequence[int], is_silent: Sequence[bool], num_ranks: int, capacity: int
) -> tuple[list[list[list[int]]], int]:
    """`deal`, with the silent sequences (they have no gradient) in micro-batches of their own, and how many those are.

    They come first on every rank, and take a forward pass alone. All stay together where that costs no more passes, and
    where every sequence is silent: an update wants a gradient, if only of zeros.
    """
    together = deal(lengths, num_ranks, capacity)
    silent, loud = ([i for i, flag in enumerate(is_silent) if flag is wanted] for wanted in (True, False))
    if not silent or not loud:
        return together, 0
    first, then = (
        [
            [[members[i] for i in chosen] for chosen in own]
            for own in deal([lengths[i] for i in members], num_ranks, capacity)
        ]
        for members in (silent, loud)
    )
    num_silent = len(first[0])
    if num_silent + GRADIENT_PASSES * len(then[0]) >= GRADIENT_PASSES * len(together[0]):
        return together, 0
    return [before + after for before, after in zip(first, then, strict=True)], num_silent


def micro_batches(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in as few micro-batches of `capacity` tokens as we find; a longer sequence has one alone.

    Algorithm 1; where a closer fit could save a micro-batch, the closest one found is taken if it does.
    """
    fitting = [index for index, length in enumerate(lengths) if length <= capacity]
    alone = [[index] for index, length in enumerate(lengths) if length > capacity]
    if not fitting:
        return alone
    fitting_lengths = [lengths[i] for i in fitting]
    bins = pack(fitting_lengths, capacity)
    if len(bins) > -(-sum(fitting_lengths) // capacity) and len(fitting) <= MAX_SEARCHED:
        closer = pack_closely(fitting_lengths, capacity)
        bins = closer if len(closer) < len(bins) else bins
    return alone + [[fitting[i] for i in members] for members in bins]


def pack_closely(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity`, each filled as far as a bounded search can.

    Every bin starts with the longest sequence left and takes the combination of others that leaves the least room
    (minimum bin slack, J. N. D. Gupta and J. C. Ho, 1999), among the first SEARCH_NODES looked at.
    """
    left = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    bins = []
    while left:
        first = left.pop(0)
        places = _fill([lengths[i] for i in left], capacity - lengths[first])
        bins.append(sorted([first, *(left[place] for place in places)]))
        taken = set(places)
        left = [index for place, index in enumerate(left) if place not in taken]
    return bins


def _fill(descending: Sequence[int], room: int) -> list[int]:
    """Places in `descending` of a combination whose sum is as close to `room` as the search finds, never above."""
    best: list[int] = []
    best_sum = nodes = 0
    chosen: list[int] = []

    def search(place: int, total: int) -> None:
        nonlocal best, best_sum, nodes
        if total > best_sum:
            best, best_sum = list(chosen), total
        previous = -1
        while place < len(descending) and best_sum < room and nodes < SEARCH_NODES:
            length = descending[place]
            if length != previous and total + length <= room:
                nodes += 1
                previous = length
                chosen.append(place)
                search(place + 1, total + length)
                chosen.pop()
            place += 1

    search(0, 0)
    return best


def _spread(bins: list[list[int]], num: int) -> list[list[int]]:
    """The same sequences in exactly `num` micro-batches: the fullest are halved; what is missing then stays empty."""
    bins = [list(members) for members in bins]
    while len(bins) < num:
        fullest = max(bins, key=len, default=[])
        if len(fullest) < 2:
            bins.append([])
            continue
        half = len(fullest) // 2
        bins.append(fullest[half:])
        del fullest[half:]
    return bins
