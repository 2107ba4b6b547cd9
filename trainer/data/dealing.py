"""Distributes sequences over ranks and micro-batches.

Advantages and the loss's weights are computed over the whole batch before, so that the distribution does not change the
result.

Sequences are first distributed so that ranks have nearly equal tokens, then each rank packs its own (arXiv 2505.24298,
Algorithm 1). Ranks synchronise in every forward and backward pass, so all get the same number of micro-batches; a rank
with too few sequences gets empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.packing import pack, partition

SEARCH_NODES = 400
"""Largest number of combinations tried to fill one micro-batch."""
MAX_SEARCHED = 4096
"""With more sequences on a rank than this, Algorithm 1 alone is close to optimal."""
GRADIENT_PASSES = 3
"""Cost of a forward and a backward pass, in forward passes."""


def deal(lengths: Sequence[int], num_ranks: int, capacity: int) -> list[list[list[int]]]:
    """Return indices of `lengths` as [rank][micro-batch][sequence]: every index once, equally many micro-batches each.

    Micro-batches have at most `capacity` tokens, except that a longer sequence has one of its own. An empty micro-batch
    means that the rank runs a dummy pass while the others compute.
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
    """Like `deal`, with silent sequences (without a gradient) in separate micro-batches; also returns their number.

    They come first on every rank, and only need a forward pass. They are not separated if that would not reduce the
    passes, or if every sequence is silent: an update needs a gradient, even if it is zero.
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
    """Return indices of `lengths` in few micro-batches of `capacity` tokens; a longer sequence has one of its own.

    Uses Algorithm 1; if a closer fit could save a micro-batch, a bounded search is tried as well.
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
    """Return indices of `lengths` in bins of at most `capacity`, each filled as far as a bounded search can.

    Every bin starts with the longest remaining sequence and takes the combination of others that leaves the least space
    (minimum bin slack, J. N. D. Gupta and J. C. Ho, 1999), among the first SEARCH_NODES combinations.
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
    """Return places in `descending` whose sum is as close to `room` as the search finds, and never above."""
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
    """Return the sequences in exactly `num` micro-batches: the fullest are halved, and others added empty if needed."""
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
