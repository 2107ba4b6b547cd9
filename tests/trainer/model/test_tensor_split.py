"""Claims about which matrices are split, and which models cannot be. tests/trainer/test_layouts.py has real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.errors import UserError
from trainer.model.tensor_split import COLUMNS, ROWS, check_split, split_modules


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "granite", "cohere"])
def test_matrices_of_attention_and_feed_forward_part_are_split_and_nothing_else(family: str, tiny_model: Any) -> None:
    found = split_modules(tiny_model(family))
    wide = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    narrow = ["self_attn.o_proj", "mlp.down_proj"]
    expected = {f"layers.{layer}.{name}": ROWS for layer in (0, 1) for name in wide}
    assert found == expected | {f"layers.{layer}.{name}": COLUMNS for layer in (0, 1) for name in narrow}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, "transformers has no plan by which the matrices of gpt2 are split"),
        ("olmo2", {}, "q_proj of olmo2 in a way (`colwise_gather_output`) that is not supported"),
        ("llama", {"attention_bias": True}, "layers.0.self_attn.o_proj of llama has a bias"),
    ],
)
def test_models_without_a_plan_that_is_supported_are_refused(
    family: str, changes: dict[str, Any], words: str, tiny_model: Any
) -> None:
    with pytest.raises(UserError) as caught:
        split_modules(tiny_model(family, **changes))
    assert words in str(caught.value)
    assert "trainer.tensor_parallel" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "words"), [(3, "model's 4 attention heads"), (4, "model's 2 heads of keys and values")]
)
def test_heads_that_do_not_divide_are_refused(size: int, words: str, tiny_model: Any) -> None:
    model = tiny_model()
    check_split(model.config, 2)
    with pytest.raises(UserError, match=words):
        check_split(model.config, size)
