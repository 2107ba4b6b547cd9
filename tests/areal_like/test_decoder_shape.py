"""Claims about a model's shape: the parameters it counts are those of the model that transformers makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.decoder_shape import PUBLIC_SHAPES, DecoderShape, public_shape, shape_of


def config_of(shape: DecoderShape) -> AutoConfig:
    family = "qwen3" if shape.has_qk_norm else "qwen2" if shape.has_qkv_bias else "llama"
    return AutoConfig.for_model(
        family, hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.inner,
        vocab_size=shape.vocabulary, tie_word_embeddings=shape.is_tied,
    )  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC_SHAPES)
def test_parameters_of_a_public_model_are_those_of_transformers_on_the_meta_device(name: str) -> None:
    shape = replace(PUBLIC_SHAPES[name], layers=2)  # all of them: python -m benchmarks.memory
    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(config.to_dict()) == shape


def test_a_public_model_is_known_by_hub_name_and_by_the_name_of_its_folder() -> None:
    assert public_shape("Qwen/Qwen3-8B") == PUBLIC_SHAPES["Qwen/Qwen3-8B"]
    assert public_shape("/models/Qwen2.5-7B-Instruct/") == PUBLIC_SHAPES["Qwen/Qwen2.5-7B"]
    assert public_shape("someone/something") is None


def test_of_a_mixture_all_experts_count_and_only_those_of_a_token_are_computed() -> None:
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
             "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128,
             "num_experts_per_tok": 8, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}  # fmt: skip
    shape = shape_of(sizes)
    assert shape is not None
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert (shape.experts_per_token, shape.inner) == (8, 768)
