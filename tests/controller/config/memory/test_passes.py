"""Claims about the bytes of a pass: formulas against the tensors that autograd keeps for real, on tiny models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.decoder_shape import DecoderShape, shape_of
from controller.config.memory.passes import (
    DIRECT_LOGITS,
    Pass,
    activation_bytes,
    head_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    transient_bytes,
)
from trainer.model import logprobs
from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import hidden_states
from trainer.model.packed import PackedSequences

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
         "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 64,
         "tie_word_embeddings": False}  # fmt: skip
TOKENS, LENGTH = 256, 64
PASS = Pass(TOKENS, 4, 4, 1024, is_checkpointed=False, has_varlen_kernel=False)


def shape_and_kept_bytes(family: str, *, is_16_bit: bool) -> tuple[DecoderShape, int]:
    """The shape, and the bytes of all storages that autograd keeps for a forward pass, parameters aside."""
    keys = {"model_type": family, **SIZES}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
    attach(model, AttentionChoice("sdpa", "test"))
    tokens = [np.arange(LENGTH) % 60 for _ in range(TOKENS // LENGTH)]
    packed = PackedSequences.build(tokens, [np.arange(LENGTH) > 0 for _ in tokens])
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_16_bit),
    ):
        hidden_states(model, packed)
    shape = shape_of(keys)
    assert shape is not None
    return shape, sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_activations_are_what_autograd_keeps(family: str) -> None:
    shape, kept_bytes = shape_and_kept_bytes(family, is_16_bit=False)
    assert activation_bytes(shape, PASS) == pytest.approx(kept_bytes, rel=0.05)


def test_activations_in_bfloat16_are_what_autograd_keeps_besides_the_cast_weights() -> None:
    shape, kept_bytes = shape_and_kept_bytes("qwen3", is_16_bit=True)
    cast_bytes = 2 * shape.layers * shape.layer_matrix_parameters
    found = activation_bytes(shape, replace(PASS, compute_bytes=2)) + cast_bytes
    assert found == pytest.approx(kept_bytes, rel=0.05)


def test_with_gradient_checkpointing_a_layer_keeps_its_input_and_makes_the_rest_again() -> None:
    shape = shape_of({"model_type": "qwen3", **SIZES})
    assert shape is not None
    one = replace(PASS, is_checkpointed=True)
    assert activation_bytes(shape, one) == TOKENS * 64 * (3 * 4 + 16)
    again = layer_backward_bytes(shape, one) - layer_backward_bytes(shape, PASS)
    assert again == layer_activation_bytes(shape, PASS)


def test_the_limit_of_logits_in_one_piece_is_the_trainers() -> None:
    assert DIRECT_LOGITS == logprobs.DIRECT_LOGITS


def test_logits_of_a_large_vocabulary_are_counted_by_chunk_and_not_by_micro_batch() -> None:
    shape = shape_of({"model_type": "qwen3", **SIZES, "vocab_size": 100_000})
    assert shape is not None
    wide, more = replace(PASS, tokens=4096), replace(PASS, tokens=8192)
    grown = head_bytes(shape, more, is_cuda=False) - head_bytes(shape, wide, is_cuda=False)
    assert grown == 4 * 4096 * 64, "only the gradient of hidden states grows"
    halved = head_bytes(shape, replace(wide, chunk_tokens=512), is_cuda=False)
    assert head_bytes(shape, wide, is_cuda=False) - halved == 512 * 100_000 * 4 * 2
    with_entropy = head_bytes(shape, replace(wide, has_entropy=True), is_cuda=False)
    assert with_entropy - head_bytes(shape, wide, is_cuda=False) == 1024 * 100_000 * 4
    assert transient_bytes(shape, wide, is_cuda=False) == head_bytes(shape, wide, is_cuda=False)
    on_gpu = head_bytes(shape, replace(wide, compute_bytes=2), is_cuda=True)
    assert on_gpu - head_bytes(shape, wide, is_cuda=False) == 6 * 100_000 * 64 + 2 * 1024 * 100_000
