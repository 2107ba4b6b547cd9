"""Claims about packed sequences in SDPA calls: which share one, and that padding and packing undo each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.segments import SLACK_SHARE, SLACK_TOKENS, Segments, make_segments


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
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
        ([20, 4, 3], ((2, 20), (1, 3))),  # shorter by 16, by 17
        ([7, 20, 20], ((3, 20),)),
        ([160, 140, 139], ((2, 160), (1, 139))),  # an eighth of 160 is 20
        ([1], ((1, 1),)),
    ],
)
def test_call_is_shared_up_to_16_tokens_or_an_eighth(lengths: list[int], groups: object) -> None:
    assert make_segments(lengths).groups == groups


def test_segments_on_another_device_are_the_same_there() -> None:
    made = make_segments([5, 3])
    assert made.to(torch.device("cpu")) is made
    moved = made.to(torch.device("meta"))
    assert (moved.longest, moved.groups) == (made.longest, made.groups)
    for name in Segments.__dataclass_fields__:
        value, there = getattr(made, name), getattr(moved, name)
        if isinstance(value, torch.Tensor):
            assert (there.device.type, there.shape, there.dtype) == ("meta", value.shape, value.dtype), name
