"""Claims about how SGLang fuses tensors, and about the checksums that follow (the real server: tests/e2e)."""

from __future__ import annotations

import hashlib

import pytest
import torch

from areal_like.errors import WeightError
from rollout.engine.server.checkpoint_names import as_checkpoint
from rollout.engine.sglang.layout import compare, server_checksums, server_layout

SHAPES = {
    "model.embed_tokens.weight": (5, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.k_proj.bias": (2,),
    "model.layers.0.self_attn.v_proj.bias": (2,),
    "model.layers.0.self_attn.q_norm.weight": (2,),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
    "model.norm.weight": (4,),
    "lm_head.weight": (5, 4),
}


def tensors():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sum_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest()[:8].hex()


def test_parts_are_fused_in_sglangs_order_whatever_theirs_is():
    layout = server_layout(SHAPES)
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    assert layout[f"{attention}.qkv_proj.weight"] == tuple(f"{attention}.{x}_proj.weight" for x in "qkv")
    assert layout[f"{attention}.qkv_proj.bias"] == tuple(f"{attention}.{x}_proj.bias" for x in "qkv")
    assert layout[f"{mlp}.gate_up_proj.weight"] == (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
    assert layout[f"{mlp}.down_proj.weight"] == (f"{mlp}.down_proj.weight",)
    assert sum(len(parts) for parts in layout.values()) == len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_are_those_of_the_concatenated_and_padded_tensors(dtype):
    given = tensors()
    found = server_checksums(given, dtype, is_head_tied=False)
    stacked = torch.cat([given[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]).to(dtype)
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == sum_of(stacked)
    padded = torch.cat([given["lm_head.weight"].to(dtype), torch.zeros(59, 4, dtype=dtype)])
    assert found["lm_head.weight"] == sum_of(padded)
    halves = [given[f"model.layers.0.mlp.{x}_proj.weight"].to(dtype) for x in ("gate", "up")]
    apart = torch.cat([torch.cat([half, torch.zeros(26, 4, dtype=dtype)]) for half in halves])
    assert found["model.layers.0.mlp.gate_up_proj.weight"] == sum_of(apart)
    down = torch.cat([given["model.layers.0.mlp.down_proj.weight"].to(dtype), torch.zeros(4, 26, dtype=dtype)], dim=1)
    assert found["model.layers.0.mlp.down_proj.weight"] == sum_of(down)
    assert found["model.norm.weight"] == sum_of(given["model.norm.weight"].to(dtype))


def test_a_tied_head_is_no_tensor_of_the_server():
    assert "lm_head.weight" not in server_checksums(tensors(), torch.float32, is_head_tied=True)


def test_one_changed_bit_one_missing_and_one_unknown_tensor_are_each_found():
    expected = server_checksums(tensors(), torch.float32, is_head_tied=False)
    derived = {"model.layers.0.self_attn.rotary_emb.cos_sin_cache": "00"}
    compare({"ranks": [{"checksums": {**expected, **derived}}]}, expected)
    changed = tensors()
    changed["model.layers.0.self_attn.k_proj.weight"].view(torch.int32)[0, 0] ^= 1
    said = server_checksums(changed, torch.float32, is_head_tied=False)
    with pytest.raises(WeightError, match=r"1 of \d+ tensors .*qkv_proj"):
        compare({"ranks": [{"checksums": said}]}, expected)
    without = {name: text for name, text in expected.items() if name != "model.norm.weight"}
    with pytest.raises(WeightError, match=r"model.norm.weight \(missing"):
        compare({"ranks": [{"checksums": without}]}, expected)
    with pytest.raises(WeightError, match=r"model.norm.weight .* not expected"):
        compare({"ranks": [{"checksums": expected}]}, without)
    with pytest.raises(WeightError, match="checksums of 2 ranks instead of one rank"):
        compare({"ranks": [{"checksums": expected}] * 2}, expected)


def test_stacked_experts_become_a_checkpoints_one_by_one_without_a_copy():
    stacked = {
        "model.layers.1.mlp.experts.gate_up_proj": torch.arange(3 * 8 * 5.0).view(3, 8, 5),
        "model.layers.1.mlp.experts.down_proj": torch.arange(3 * 5 * 4.0).view(3, 5, 4),
        "model.layers.1.mlp.gate.weight": torch.ones(3, 5),
    }
    named = as_checkpoint(stacked)
    assert len(named) == 3 * 3 + 1
    both = stacked["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(named["model.layers.1.mlp.experts.2.gate_proj.weight"], both[2, :4])
    assert torch.equal(named["model.layers.1.mlp.experts.2.up_proj.weight"], both[2, 4:])
    down = named["model.layers.1.mlp.experts.1.down_proj.weight"]
    assert torch.equal(down, stacked["model.layers.1.mlp.experts.down_proj"][1])
    assert all(tensor.is_contiguous() for tensor in named.values())
    assert named["model.layers.1.mlp.gate.weight"] is stacked["model.layers.1.mlp.gate.weight"]
    plain = tensors()
    assert as_checkpoint(plain).keys() == plain.keys()
