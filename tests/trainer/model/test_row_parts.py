"""The parts of a row hold each token and prediction once, in order, and the boundaries of the whole row."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.gather import gather_rows
from trainer.model.packed import PackedSequences
from trainer.model.row_parts import part_of
from trainer.model.sequence_group import SequenceGroup


def parts_of(packed: PackedSequences, size: int) -> list[Any]:
    return [part_of(packed, SequenceGroup(place, size, cast(Any, None))) for place in range(size)]


@settings(max_examples=num_examples(60), deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=6), st.integers(2, 8))
def test_parts_hold_every_token_and_prediction_once(tails: list[list[bool]], size: int) -> None:
    masks = [np.asarray([False, *tail]) for tail in tails]
    masks[0][-1] = True
    rng = np.random.default_rng(0)
    packed = PackedSequences.build([rng.integers(1, 99, len(mask)) for mask in masks], masks)
    parts = parts_of(packed, size)
    num = packed.num_tokens
    padded = torch.cat([part.packed.tokens_T for part in parts])
    positions = torch.cat([part.packed.positions_T for part in parts])
    assert {part.packed.num_tokens for part in parts} == {-(-num // size)}
    assert torch.equal(padded[:num], packed.tokens_T)
    assert torch.equal(positions[:num], packed.positions_T)
    assert positions[num:].tolist() == list(range(len(padded) - num)), "the padding is a sequence of its own"
    assert {part.packed.segments.num_own for part in parts} == {-(-num // size)}
    own = len(parts[0].packed.tokens_T)
    places = np.concatenate([part.packed.source_places + index * own for index, part in enumerate(parts)])
    assert np.array_equal(places, packed.sources_N.numpy())
    assert torch.equal(torch.cat([part.packed.targets_N for part in parts]), packed.targets_N)
    assert torch.equal(torch.cat([part.packed.sequence_N for part in parts]), packed.sequence_N)
    assert parts[0].counts == tuple(part.packed.num_predictions for part in parts)


def test_boundaries_of_a_part_are_those_of_the_row_and_its_padding() -> None:
    packed = PackedSequences.build([np.arange(1, 6), np.arange(1, 3)], [np.arange(5) > 1, np.arange(2) > 0])
    for part in parts_of(packed, 4):
        assert part.packed.segments.cu_seqlens.tolist() == [0, 5, 7, 8]
        assert part.packed.segments.longest == 5
        assert part.packed.segments.sequence_group is part.group


def test_part_of_a_model_that_gathers_tokens_has_the_positions_and_boundaries_of_the_row() -> None:
    packed = PackedSequences.build([np.arange(1, 6), np.arange(1, 3)], [np.arange(5) > 1, np.arange(2) > 0])
    for place in range(4):
        group = SequenceGroup(place, 4, cast(Any, None))
        plain, gathered = part_of(packed, group), part_of(packed, group, is_gathered=True)
        assert torch.equal(gathered.packed.tokens_T, plain.packed.tokens_T)
        assert gathered.counts == plain.counts
        assert gathered.packed.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
        assert gathered.packed.segments.cu_seqlens.tolist() == [0, 5, 7, 8]
        assert gathered.packed.segments.num_own == 8


def test_gradient_of_a_part_without_predictions_is_zero() -> None:
    packed = PackedSequences.build([np.arange(1, 9)], [np.arange(8) == 7])
    first = parts_of(packed, 2)[0].packed
    hidden_SD = torch.ones(4, 3, requires_grad=True)
    gather_rows(hidden_SD, first.sources_N, first.prediction_T, absent=first.unused).sum().backward()
    assert hidden_SD.grad is not None
    assert not hidden_SD.grad.any()
