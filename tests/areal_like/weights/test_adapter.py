"""The names that peft gives to the tensors of an adapter, and which names are none."""

from __future__ import annotations

import pytest

from areal_like.weights.adapter import own_name, part_names, peft_name


@pytest.mark.parametrize("weight", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"])
def test_names_of_both_parts_are_read_back(weight: str) -> None:
    names = part_names(weight)
    assert names == [f"base_model.model.model.layers.0.mlp.up_proj.lora_{part}.weight" for part in "AB"]
    assert [own_name(name) for name in names] == [f"model.layers.0.mlp.up_proj.lora_{part}" for part in "AB"]
    assert [peft_name(own_name(name)) for name in names] == names


@pytest.mark.parametrize(
    "name",
    [
        "model.up_proj.lora_A.weight",
        "base_model.model.model.up_proj.lora_A",
        "model.up_proj.lora_A",
        "base_model.model.model.up_proj.weight",
        "base_model.model.model.up_proj.lora_C.weight",
        "base_model.model.model.lora_A.up_proj.weight",
        "base_model.model.model.up_proj.lora_A.default.weight",
        "",
    ],
)
def test_another_name_is_refused_with_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is not the name of a LoRA adapter tensor"):
        own_name(name)
