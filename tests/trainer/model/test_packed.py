"""Packing keeps every token, position and prediction where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from example_counts import num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model.gather import gather_rows
from trainer.model.packed import PackedSequences


@settings(max_examples=num_examples(60), deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=12), st.integers(0, 99))
def test_predictions_are_the_masked_tokens_made_one_position_earlier(tails: list[list[bool]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [np.asarray([False, *tail]) for tail in tails]
    masks[0][-1] = True
    tokens = [rng.integers(0, 1000, len(mask)).astype(np.int32) for mask in masks]
    packed = PackedSequences.build(tokens, masks)
    flat = np.concatenate(tokens)
    assert np.array_equal(packed.tokens_T.numpy(), flat)
    assert np.array_equal(packed.targets_N.numpy(), np.concatenate([t[m] for t, m in zip(tokens, masks, strict=True)]))
    assert np.array_equal(flat[packed.sources_N.numpy() + 1], packed.targets_N.numpy())
    starts = packed.segments.cu_seqlens.numpy()[:-1]
    assert np.array_equal(packed.positions_T.numpy(), np.arange(len(flat)) - np.repeat(starts, packed.lengths))
    counts = np.bincount(packed.sequence_N.numpy(), minlength=len(masks))
    assert counts.tolist() == [int(mask.sum()) for mask in masks]
    assert packed.num_tokens == len(flat)
    assert packed.num_predictions == sum(mask.sum() for mask in masks)


def test_what_cannot_be_predicted_is_refused() -> None:
    tokens = [np.arange(4, dtype=np.int32)]
    with pytest.raises(ValueError, match="first token"):
        PackedSequences.build(tokens, [np.ones(4, bool)])
    with pytest.raises(ValueError, match="the loss masks select no tokens"):
        PackedSequences.build(tokens, [np.zeros(4, bool)])
    with pytest.raises(ValueError, match="got 4 tokens and a loss mask of length 3"):
        PackedSequences.build(tokens, [np.asarray([False, True, True])])


def test_gathering_rows_has_the_gradient_of_plain_indexing() -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.tensor([4, 0, 2])
    inverse, absent = torch.tensor([1, 0, 2, 0, 0]), torch.tensor([1, 3])
    upstream = torch.randn(3, 2, generator=generator)
    x = torch.randn(5, 2, generator=generator, requires_grad=True)
    gather_rows(x, index, inverse, absent).backward(upstream)
    ours, x.grad = x.grad, None
    x[index].backward(upstream)
    assert torch.equal(ours, x.grad)


def test_row_on_another_device_is_the_same_there_and_stays_where_it_is_already() -> None:
    packed = PackedSequences.build([np.arange(4, dtype=np.int32)], [np.asarray([False, True, True, True])])
    assert packed.to(torch.device("cpu")) is packed
    moved = packed.to(torch.device("meta"))
    for name, value in vars(packed).items():
        if isinstance(value, torch.Tensor):
            assert getattr(moved, name).device.type == "meta", name
            assert getattr(moved, name).shape == value.shape
    assert moved.segments.cu_seqlens.device.type == "meta"
    assert moved.lengths is packed.lengths
