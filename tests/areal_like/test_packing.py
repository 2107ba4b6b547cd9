"""Claims about micro-batches and shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.packing import pack, partition

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def algorithm_1(lengths: list[int], capacity: int, min_bins: int) -> list[set[int]]:
    """arXiv 2505.24298, Algorithm 1, line by line."""
    bins: list[set[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        fits = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if len(bins) < min_bins or not fits:
            bins.append({index})
        else:
            min(fits, key=len).add(index)
    return bins


@given(LENGTHS, st.integers(100, 400), st.integers(1, 10))
def test_pack_is_algorithm_1(lengths: list[int], capacity: int, min_bins: int) -> None:
    assert [set(members) for members in pack(lengths, capacity, min_bins)] == algorithm_1(lengths, capacity, min_bins)


@given(LENGTHS, st.integers(100, 400), st.integers(1, 10))
def test_every_sequence_is_in_one_bin_and_no_bin_overflows(lengths: list[int], capacity: int, min_bins: int) -> None:
    bins = pack(lengths, capacity, min_bins)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[i] for i in members) <= capacity for members in bins)
    assert len(bins) >= min(min_bins, len(lengths))


def test_one_bin_is_enough_unless_more_are_asked_for() -> None:
    assert pack([1, 2, 3], 6) == [[0, 1, 2]]
    assert pack([1, 2, 3], 5) == [[1, 2], [0]]
    assert pack([4, 4], 8) == [[0, 1]], "a bin may be full"
    assert pack([], 1) == []
    assert pack([1], 1) == [[0]]


def test_the_longest_sequences_go_to_the_lightest_shares_first() -> None:
    assert partition([1, 1, 1], 1) == [[0, 1, 2]]
    assert partition([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert partition([], 2) == [[], []]


@given(LENGTHS, st.integers(1, 12))
def test_shares_are_complete_balanced_and_not_empty(lengths: list[int], num_bins: int) -> None:
    shares = partition(lengths, num_bins)
    assert len(shares) == num_bins
    assert sorted(index for members in shares for index in members) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in members) for members in shares]
    assert max(sums) - min(sums) <= max(lengths, default=0)
    if len(lengths) >= num_bins:
        assert all(shares)


def test_sequence_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit"):
        pack([5, 101], 100)


@pytest.mark.parametrize("call", [lambda: pack([0], 10), lambda: pack([1], 0), lambda: pack([1], 1, 0),
                                  lambda: partition([1], 0), lambda: partition([-1], 1)])  # fmt: skip
def test_nonsense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="at least 1"):
        call()
