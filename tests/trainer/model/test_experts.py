"""Grouped products compute what the loop over experts of transformers' classes does, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.model import agreement
from trainer.model.attention import AttentionChoice, attach
from trainer.model.experts import LOOP, NAME, attach_experts, expert_modules
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences

SDPA = AttentionChoice("sdpa", "test")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def made(tiny_model: Callable[..., PreTrainedModel], family: str) -> PreTrainedModel:
    return tiny_model(family, num_key_value_heads=2, **FAMILIES[family])


def results(model: PreTrainedModel, packed: PackedSequences) -> dict[str, torch.Tensor]:
    """Log-probs and gradients."""
    model.zero_grad()
    logprobs_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=64, with_entropy=False)
    (logprobs_N * torch.linspace(-1.0, 1.0, len(logprobs_N))).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"logprobs": logprobs_N.detach()}


@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_products_train_as_the_loop_over_experts(family: str, tiny_model: Any, sequences: Any) -> None:
    model = made(tiny_model, family)
    attach(model, SDPA)
    packed = PackedSequences.build(*sequences((9, 30, 5)))
    attach_experts(model, LOOP)
    expected = results(model, packed)
    attach_experts(model)
    found = results(model, packed)
    assert model.config._experts_implementation == NAME
    assert found.keys() == expected.keys()
    assert any("experts" in name for name in found)
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


def test_experts_without_tokens_get_a_gradient_of_zero(tiny_model: Any, sequences: Any) -> None:
    model = made(tiny_model, "qwen3_moe")
    attach(model, SDPA)
    attach_experts(model)
    found = results(model, PackedSequences.build(*sequences((2,))))
    gradients = [value for name, value in found.items() if name.endswith("gate_up_proj")]
    unused = [gradient_2ID for gradient in gradients for gradient_2ID in gradient if not gradient_2ID.any()]
    assert len(unused) == 2 * 4, "a token chooses two of six experts in both layers"


def test_products_compute_in_the_dtype_of_autocast(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.model import experts

    model, used = made(tiny_model, "qwen3_moe"), []

    def product(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        used.append((rows.dtype, weights.dtype))
        return torch.nn.functional.grouped_mm(rows, weights, offs=offs)

    monkeypatch.setattr(experts, "grouped_mm", product)
    (module, _) = expert_modules(model)
    attach_experts(model)
    hidden_TD = torch.randn(12, 32, requires_grad=True)
    experts_TK, scores_TK = torch.randint(0, 6, (12, 2)), torch.rand(12, 2)
    whole = module(hidden_TD, experts_TK, scores_TK)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(hidden_TD, experts_TK, scores_TK)
    found.square().sum().backward()
    assert used == [(torch.float32, torch.float32)] * 2 + [(torch.bfloat16, torch.bfloat16)] * 2
    assert found.dtype == torch.float32
    assert torch.allclose(found, whole, rtol=0.05, atol=0.02)
    assert module.down_proj.grad.dtype == torch.float32
    assert hidden_TD.grad.dtype == torch.float32


def test_a_model_is_compared_with_its_own_loop_before_it_trains(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from areal_like.errors import UserError
    from trainer.model import experts

    model = made(tiny_model, "qwen3_moe")
    assert agreement.check(model, SDPA, torch.float32) < 1e-4
    assert model.config._experts_implementation == NAME
    monkeypatch.setattr(experts, "_is_plain", lambda module: True)
    wrong = experts.grouped_mm
    monkeypatch.setattr(experts, "grouped_mm", lambda *arguments, **keys: 1.5 * wrong(*arguments, **keys))
    with pytest.raises(UserError, match="differ by"):
        agreement.check(model, SDPA, torch.float32)


def test_a_dense_model_is_left_as_it_is(tiny_model: Any) -> None:
    model = tiny_model("qwen3")
    attach_experts(model)
    assert model.config._experts_implementation != NAME


def test_other_layouts_are_left_to_transformers() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    (module,) = expert_modules(model := AutoModelForCausalLM.from_config(config))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    arguments = torch.randn(12, 32), torch.randint(0, 4, (12, 2)), torch.rand(12, 2)
    attach_experts(model, LOOP)
    expected = module(*arguments)
    attach_experts(model)
    assert torch.allclose(module(*arguments), expected, atol=1e-5)
