"""Which models the lean decoder covers, read from their configs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import UserError
from rollout.engine.shape import ModelShape, exact_context, read_config, why_not_lean


def config(**changes: Any) -> Any:
    facts = {
        "model_type": "llama", "hidden_act": "silu", "rope_parameters": None, "num_hidden_layers": 2,
        "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 64,
        "vocab_size": 99, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    return SimpleNamespace(**facts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"model_type": "gpt2"}, "model type gpt2"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"layer_types": ["full_attention"] * 2}, ""),
        ({"layer_types": None}, ""),
        ({"rope_parameters": {"rope_type": "yarn"}}, ""),
        ({"rope_parameters": {"rope_type": "unheard_of"}}, "rotary variant unheard_of"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary embedding"),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, ""),
    ],
)
def test_the_lean_decoder_names_the_first_thing_it_does_not_cover(changes: dict[str, Any], reason: str) -> None:
    found = why_not_lean(config(**changes))
    assert found.startswith(reason)
    assert bool(found) is bool(reason)


@pytest.mark.parametrize(("head_dim", "head_size"), [({}, 8), ({"head_dim": None}, 8), ({"head_dim": 16}, 16)])
def test_the_head_size_is_the_stated_one_else_the_share_of_the_hidden_size(
    head_dim: dict[str, Any], head_size: int
) -> None:
    shape = ModelShape.of(config(**head_dim))
    assert shape.head_size == head_size
    assert shape.num_queries_per_key == 3


@pytest.mark.parametrize(
    ("facts", "biases"),
    [
        ({}, (False, False, False, False)),
        ({"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({"model_type": "qwen2", "attention_bias": True}, (True, False, False, False)),
        ({"model_type": "qwen3"}, (False, False, False, True)),
    ],
)
def test_each_family_has_its_own_biases_and_norms(facts: dict[str, Any], biases: tuple[bool, ...]) -> None:
    shape = ModelShape.of(config(**facts))
    assert (shape.has_qkv_bias, shape.has_out_bias, shape.has_mlp_bias, shape.has_qk_norm) == biases


@pytest.mark.parametrize(("positions", "context"), [(None, 77), (100, 77), (77, 77), (50, 50)])
def test_the_context_is_the_setting_or_what_positions_the_model_has(
    positions: int | None, context: int, caplog: pytest.LogCaptureFixture
) -> None:
    facts = {} if positions is None else {"max_position_embeddings": positions}
    model: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**facts))
    with caplog.at_level("INFO"):
        assert exact_context(model, 77) == context
    assert bool(caplog.records) == (context < 77)


def test_a_folder_without_a_readable_config_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    assert read_config(tmp_path).vocab_size == 9
