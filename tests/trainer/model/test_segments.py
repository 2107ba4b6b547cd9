"""Claims about packed sequences in SDPA calls: which share one, and that padding and packing undo each other."""

from __future__ import annotations

import pytest
import torch
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.segments import SLACK_SHARE, SLACK_TOKENS, Segments, make_segments


@settings(max_examples=num_examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_padding_and_packing_undo_each_other(lengths: list[int]) -> None:
    made, num = make_segments(lengths), sum(lengths)
    assert made.cu_seqlens.dtype == torch.int32
    assert made.cu_seqlens.tolist() == [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    assert made.longest == max(lengths)
    assert sum(members for members, _ in made.groups) == len(lengths)
    assert len(made.to_padded_P) == sum(members * width for members, width in made.groups)
    assert made.to_padded_P[made.to_packed_T].tolist() == list(range(num))
    taken = {*made.to_packed_T.tolist()}
    assert sorted(taken | {*made.padding.tolist()}) == list(range(len(made.to_padded_P)))
    assert len(made.padding) == len(made.to_padded_P) - num
    starts = made.cu_seqlens[:-1].tolist()
    assert {*made.to_padded_P[made.padding].tolist()} <= {*starts}, "padding repeats a first token"


@settings(max_examples=num_examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_sequences_of_a_call_are_in_one_piece_and_near_its_longest(lengths: list[int]) -> None:
    made, first = make_segments(lengths), 0
    widths = [width for _, width in made.groups]
    assert widths == sorted(widths, reverse=True)
    for members, width in made.groups:
        slots = made.to_padded_P[first : first + members * width].view(members, width)
        first += members * width
        for row in slots.tolist():
            start = row[0]
            length = lengths[made.cu_seqlens.tolist().index(start)]
            assert row == [*range(start, start + length), *[start] * (width - length)]
            assert width - length <= max(SLACK_TOKENS, width // SLACK_SHARE)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ((40, 24), ((2, 40),)), ((40, 23), ((1, 40), (1, 23))),  # shorter by at most 16 tokens
        ((400, 350), ((2, 400),)), ((400, 349), ((1, 400), (1, 349))),  # or by an eighth
        ((10, 400, 30, 390, 12), ((2, 400), (1, 30), (2, 12))), ((5,), ((1, 5),)), ((7, 7, 7), ((3, 7),)),
        ((60, 44, 28), ((2, 60), (1, 28))),  # than the longest of its group, not than its neighbour
    ],
)  # fmt: skip
def test_sequences_share_a_call_with_the_longest_they_are_not_much_shorter_than(
    lengths: tuple[int, ...], groups: object
) -> None:
    assert make_segments(lengths).groups == groups


def test_slot_of_padding_repeats_the_first_token_of_its_own_sequence() -> None:
    segments = make_segments((2, 4))
    assert segments.groups == ((2, 4),)
    assert segments.to_padded_P.tolist() == [2, 3, 4, 5, 0, 1, 0, 0]
    assert segments.padding.tolist() == [6, 7]
    assert segments.to_packed_T.tolist() == [4, 5, 0, 1, 2, 3]


def test_segments_on_another_device_are_the_same_there() -> None:
    made = make_segments([5, 3])
    assert made.to(torch.device("cpu")) is made
    moved = made.to(torch.device("meta"))
    assert (moved.longest, moved.groups) == (made.longest, made.groups)
    for name in Segments.__dataclass_fields__:
        value, there = getattr(made, name), getattr(moved, name)
        if isinstance(value, torch.Tensor):
            assert (there.device.type, there.shape, there.dtype) == ("meta", value.shape, value.dtype), name
