"""Keys and values in their rows: what is written is read, copied and attended, and nothing behind a row's end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rollout.engine import kv_cache
from rollout.engine.kv_cache import KVCache
from rollout.engine.shape import ModelShape

CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="llama", num_layers=2, hidden_size=8, num_heads=4, num_key_heads=2, head_size=3, intermediate_size=5,
    vocab_size=7, norm_eps=1e-6, is_head_tied=False, has_qkv_bias=False, has_out_bias=False, has_mlp_bias=False,
    has_qk_norm=False,
)  # fmt: skip
SLOTS, CONTEXT = 5, 40
TOKEN_BYTES = 2 * 2 * 3 * 4
"""Keys and values of one token in one layer, float32."""


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SHAPE, SLOTS, CONTEXT, dtype, CPU)


def filled(made: KVCache, row: int, length: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values [T, K, D] of the first tokens of a row."""
    generator = torch.Generator().manual_seed(100 * row + layer)
    keys, values = torch.randn(2, length, 2, 3, generator=generator)
    places = made.places(torch.full((length,), row), torch.arange(length))
    made.write(layer, places, keys, values)
    return keys, values


def test_memory_is_that_of_keys_and_values_of_all_slots() -> None:
    assert cache().num_bytes == SHAPE.num_layers * SLOTS * CONTEXT * TOKEN_BYTES
    assert cache(torch.bfloat16).num_bytes == SHAPE.num_layers * SLOTS * CONTEXT * TOKEN_BYTES // 2


def test_so_many_tokens_are_copied_at_a_time_as_the_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_bytes, num_tokens in ((10 * 2 * TOKEN_BYTES, 10), (10 * 2 * TOKEN_BYTES - 1, 9), (1, 1)):
        monkeypatch.setattr(kv_cache, "COPY_BYTES", num_bytes)
        assert cache().tokens_per_copy == num_tokens, "of all layers, and one at least"


def test_a_call_costs_as_much_as_the_tokens_a_core_reads_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "CPU_CALL_BYTES", 7 * TOKEN_BYTES)
    assert cache().call_tokens == 7
    assert cache(torch.bfloat16).call_tokens == 14


@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_written_is_read_from_its_row_and_layer(layer: int) -> None:
    made = cache()
    keys, values = filled(made, 3, 6, layer)
    read_keys, read_values = made.read(layer, torch.tensor([3, 1]), 6)
    assert torch.equal(read_keys[0], keys.transpose(0, 1))
    assert torch.equal(read_values[0], values.transpose(0, 1))
    assert not read_keys[1].any()
    other_keys, _ = made.read(1 - layer, torch.tensor([3]), 6)
    assert not other_keys.any()


def test_copied_rows_begin_with_the_tokens_of_their_sources_in_all_layers() -> None:
    made = cache()
    expected = [filled(made, 3, 6, layer) for layer in range(2)]
    filled(made, 0, 9)
    kept, _ = made.read(0, torch.tensor([0]), 9)
    made.put(torch.tensor([0, 4]), made.take(torch.tensor([3, 3]), 5))
    for layer, (keys, values) in enumerate(expected):
        read_keys, read_values = made.read(layer, torch.tensor([0, 4]), 5)
        for row in range(2):
            assert torch.equal(read_keys[row], keys[:5].transpose(0, 1))
            assert torch.equal(read_values[row], values[:5].transpose(0, 1))
    behind, _ = made.read(0, torch.tensor([0]), 9)
    assert torch.equal(behind[:, :, 5:], kept[:, :, 5:]), "what lay behind them stays"


def test_cleared_rows_are_zero_in_all_layers_and_others_stay() -> None:
    made = cache()
    for row in range(SLOTS):
        for layer in range(2):
            filled(made, row, CONTEXT, layer)
    made.clear_rows(torch.tensor([1, 4]))
    for layer in range(2):
        keys, values = made.read(layer, torch.arange(SLOTS), CONTEXT)
        for row in range(SLOTS):
            assert bool(keys[row].any()) == bool(values[row].any()) == (row not in (1, 4))


@pytest.mark.parametrize("call_tokens", [1, kv_cache.ONE_BLOCK])
@pytest.mark.parametrize("lengths", [[1], [33, 20, 17, 1], [5, 33], [CONTEXT, CONTEXT]])
def test_a_new_token_attends_to_its_own_row_up_to_itself(lengths: list[int], call_tokens: int) -> None:
    made = cache()
    made.call_tokens = call_tokens
    rows = [filled(made, row, CONTEXT) for row in range(len(lengths))]
    lengths_B = np.array(lengths)
    positions = torch.from_numpy(lengths_B - 1)
    plan = made.plan(positions, lengths_B)
    new_keys, new_values = torch.randn(2, len(lengths), 2, 3, generator=torch.Generator().manual_seed(1))
    made.write(0, plan.places, new_keys, new_values)
    query = torch.randn(len(lengths), 2, 2, 3, generator=torch.Generator().manual_seed(2))
    attended = made.attend(0, plan, query)
    for row, length in enumerate(lengths):
        keys, values = (part[:length].clone() for part in rows[row])
        keys[-1], values[-1] = new_keys[row], new_values[row]
        scores = torch.einsum("kgd,tkd->kgt", query[row], keys) / 3**0.5
        expected = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values).reshape(-1)
        assert torch.allclose(attended[row], expected, atol=1e-5)
    is_ordered = lengths == sorted(lengths, reverse=True)
    num_spans = len({-(-length // 16) for length in lengths})
    assert len(plan.blocks) == (num_spans if call_tokens == 1 and is_ordered else 1)


def test_the_cost_of_a_step_counts_keys_read_and_calls() -> None:
    made = cache()
    made.call_tokens = 1
    assert made.cost(np.array([33, 20])) == 40 + 32 + 1
    assert made.cost(np.array([33, 33])) == 80
    made.call_tokens = kv_cache.ONE_BLOCK
    assert made.cost(np.array([33, 20])) == 80


def test_heads_of_a_larger_group_change_nothing_about_the_memory() -> None:
    wide = KVCache(dataclasses.replace(SHAPE, num_heads=8), SLOTS, CONTEXT, torch.float32, CPU)
    assert wide.num_bytes == cache().num_bytes
