"""Claims about a model's shape: the parameters it counts are those of the model that transformers makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_like.decoder_shape import EXPERTS, PUBLIC_SHAPES, DecoderShape, public_names, public_shape, shape_of


def config_of(shape: DecoderShape) -> AutoConfig:
    family = "qwen3" if shape.has_qk_norm else "qwen2" if shape.has_qkv_bias else "llama"
    experts = {
        "num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.inner,
    } if shape.experts > 1 else {}  # fmt: skip
    return AutoConfig.for_model(
        f"{family}_moe" if experts else family, **experts, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.inner, vocab_size=shape.vocabulary, tie_word_embeddings=shape.is_tied,
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
    assert shape.largest_matrix == 2048 * 768 * 128


DENSE = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3,
         "intermediate_size": 5, "vocab_size": 11, "model_type": "llama"}  # fmt: skip
SHAPE = DecoderShape(
    layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, inner=5, vocabulary=11, is_tied=False
)  # fmt: skip
MIXTURE = {**DENSE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7}


def test_parameters_of_a_small_decoder_are_counted_by_hand() -> None:
    assert (SHAPE.query_width, SHAPE.key_width) == (12, 6)
    assert SHAPE.layer_matrix_parameters == (8 * 12) * 2 + (8 * 6) * 2 + 3 * 8 * 5
    assert SHAPE.layer_parameters == SHAPE.layer_matrix_parameters + 2 * 8
    assert replace(SHAPE, has_qkv_bias=True).layer_parameters == SHAPE.layer_parameters + 12 + 6 + 6
    assert replace(SHAPE, has_qk_norm=True).layer_parameters == SHAPE.layer_parameters + 2 * 3
    assert SHAPE.outer_parameters == 11 * 8 * 2 + 8
    assert replace(SHAPE, is_tied=True).outer_parameters == 11 * 8 + 8
    assert SHAPE.parameters == 2 * SHAPE.layer_parameters + SHAPE.outer_parameters
    mixture = replace(SHAPE, experts=2)
    assert mixture.layer_matrix_parameters == SHAPE.layer_matrix_parameters + 3 * 8 * 5 + 8 * 2, "with a router"


def test_largest_matrix_is_the_widest_projection() -> None:
    assert SHAPE.largest_matrix == 8 * 12
    assert replace(SHAPE, inner=13).largest_matrix == 8 * 13
    assert replace(SHAPE, experts=3).largest_matrix == 8 * 5 * 3


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (DENSE, SHAPE),
        ({"text_config": DENSE, "vocab_size": 99}, SHAPE),
        ({"text_config": DENSE, "tie_word_embeddings": True}, replace(SHAPE, is_tied=True)),
        ({"text_config": {**DENSE, "tie_word_embeddings": False}, "tie_word_embeddings": True}, SHAPE),
        ({**DENSE, "text_config": None}, SHAPE),
        ({**DENSE, "tie_word_embeddings": True}, replace(SHAPE, is_tied=True)),
        ({**DENSE, "num_key_value_heads": None}, replace(SHAPE, kv_heads=4)),
        ({**DENSE, "head_dim": None}, replace(SHAPE, head_dim=2)),
        ({**DENSE, "attention_bias": True}, replace(SHAPE, has_qkv_bias=True)),
        ({**DENSE, "model_type": "qwen2"}, replace(SHAPE, has_qkv_bias=True)),
        ({**DENSE, "model_type": "qwen3"}, replace(SHAPE, has_qk_norm=True)),
        ({**DENSE, "num_experts": 1, "moe_intermediate_size": 7, "num_experts_per_tok": 2}, SHAPE),
        ({**DENSE, "moe_intermediate_size": 7, "num_experts_per_tok": 2}, SHAPE),
        (MIXTURE, replace(SHAPE, experts=6, experts_per_token=2, inner=7)),
        ({**DENSE, "num_experts": 2}, replace(SHAPE, experts=2)),
    ],
)
def test_shape_is_read_from_a_config(config: dict[str, Any], shape: DecoderShape) -> None:
    assert shape_of(config) == shape


@pytest.mark.parametrize("key", EXPERTS)
def test_experts_are_counted_by_the_key_of_any_family(key: str) -> None:
    shape = shape_of({**DENSE, key: 6})
    assert shape is not None
    assert (shape.experts, shape.experts_per_token) == (6, 1)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, 0, -1, True, 8.0, "8"])
def test_config_without_a_size_has_no_shape(key: str, value: Any) -> None:
    assert shape_of({**DENSE, key: value}) is None


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "num_experts"])
@pytest.mark.parametrize("value", [0, True, 2.0])
def test_size_with_a_default_that_is_no_positive_whole_number_makes_no_shape(key: str, value: Any) -> None:
    assert shape_of({**DENSE, key: value}) is None


# Numbers of parameters as the hub shows them for the published files; tied heads once.
PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
}


def test_public_models_have_as_many_parameters_as_were_published() -> None:
    assert {name: shape.parameters for name, shape in PUBLIC_SHAPES.items()} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("qwen/qwen3-8b-base", "Qwen/Qwen3-8B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Meta-Llama-3-70B"),
        ("Qwen/Qwen2.5-Math-7B", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-Math-1.5B-Instruct", "Qwen/Qwen2.5-1.5B"),
    ],
)
def test_public_models_are_known_by_their_variants(name: str, known_as: str) -> None:
    assert public_shape(name) == PUBLIC_SHAPES[known_as]


def test_public_names_are_the_last_parts_in_lower_case() -> None:
    assert public_names()["qwen3-0.6b"] == PUBLIC_SHAPES["Qwen/Qwen3-0.6B"]
    assert all(name == name.lower() and "/" not in name for name in public_names())
    assert len(public_names()) == len(PUBLIC_SHAPES) + 5
