"""Replayed routes are the recorded ones, bit for bit; tokens without a record and other passes are routed as before."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.backends.port import Setup
from trainer.config import TrainerSettings
from trainer.export import write_model
from trainer.model.attention import AttentionChoice, attach
from trainer.model.experts import attach_experts
from trainer.model.logprobs import token_logprobs
from trainer.model.outline import outline
from trainer.model.packed import PackedSequences
from trainer.model.router_replay import attach_replay, set_routes
from trainer.ranks import Ranks
from trainer.step import ready_outline

LENGTHS, LAYERS, CHOSEN, EXPERTS = (9, 30, 5), 3, 2, 6
MIXTURE: dict[str, Any] = {
    "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def model(tiny_model: Any) -> PreTrainedModel:
    """The second layer is dense."""
    made = tiny_model("qwen3_moe", **MIXTURE, mlp_only_layers=[1])
    attach(made, AttentionChoice("sdpa", "test"))
    attach_experts(made)
    return made


def observed(model: PreTrainedModel, packed: PackedSequences) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Log-probs, and the experts [T, K] that were used in each layer."""
    used: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, i=index: used.update({i: args[1].clone()}))
        for index, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    logprobs_N, _ = token_logprobs(model, packed, temperature=1.0, chunk_tokens=64, with_entropy=False)
    for hook in hooks:
        hook.remove()
    return logprobs_N, used


def recorded(used: dict[int, torch.Tensor]) -> list[np.ndarray]:
    """The routes as an engine reports them: for every layer, without the last token of a sequence."""
    routes_TLK = np.zeros((sum(LENGTHS), LAYERS, CHOSEN), np.uint8)
    for layer, chosen_TK in used.items():
        routes_TLK[:, layer] = chosen_TK.numpy()
    ends = np.cumsum(LENGTHS)
    return [routes_TLK[end - length : end - 1] for end, length in zip(ends, LENGTHS, strict=True)]


def test_own_routes_replayed_give_the_same_bits(model: PreTrainedModel, sequences: Any) -> None:
    tokens, masks = sequences(LENGTHS)
    logprobs_N, used = observed(model, PackedSequences.build(tokens, masks))
    attach_replay(model)
    again_N, replayed = observed(model, PackedSequences.build(tokens, masks, recorded(used)))
    assert used.keys() == {0, 2}
    assert all(torch.equal(replayed[layer], used[layer]) for layer in used)
    assert torch.equal(again_N, logprobs_N)


def test_other_routes_are_used_where_they_are_known_and_train_the_router(
    model: PreTrainedModel, sequences: Any
) -> None:
    tokens, masks = sequences(LENGTHS)
    plain_N, used = observed(model, PackedSequences.build(tokens, masks))
    routes = recorded({layer: (chosen_TK + 1) % EXPERTS for layer, chosen_TK in used.items()})
    attach_replay(model)
    packed = PackedSequences.build(tokens, masks, [routes[0], None, routes[2]])
    logprobs_N, replayed = observed(model, packed)
    first, second = slice(0, LENGTHS[0] - 1), slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    assert torch.equal(replayed[0][first], (used[0][first] + 1) % EXPERTS)
    assert torch.equal(replayed[0][second], used[0][second])
    is_second_N = packed.sequence_N == 1
    assert torch.equal(logprobs_N[is_second_N], plain_N[is_second_N])
    assert not torch.allclose(logprobs_N[~is_second_N], plain_N[~is_second_N], atol=1e-2)
    logprobs_N.sum().backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_checkpointed_layers_route_alike_in_the_backward_pass(model: PreTrainedModel, sequences: Any) -> None:
    tokens, masks = sequences(LENGTHS)
    _, used = observed(model, PackedSequences.build(tokens, masks))
    routes = recorded({layer: (chosen_TK + 1) % EXPERTS for layer, chosen_TK in used.items()})
    attach_replay(model)
    packed, gradients = PackedSequences.build(tokens, masks, routes), []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        model.zero_grad()
        observed(model, packed)[0].sum().backward()
        gradients.append(model.model.layers[0].mlp.experts.down_proj.grad.clone())
    assert torch.allclose(*gradients, atol=1e-6)


def test_a_subset_of_the_sequences_keeps_its_routes(sequences: Any) -> None:
    tokens, masks = sequences(LENGTHS)
    routes = [np.full((length - 1, LAYERS, CHOSEN), length, np.uint8) for length in LENGTHS]
    packed, _ = PackedSequences.build(tokens, masks, routes).subset([2, 0])
    assert packed.routes_TLK is not None
    assert packed.routes_TLK[:, 0, 0].tolist() == [5] * 4 + [-1] + [9] * 8 + [-1]


def test_routes_of_another_model_and_models_without_routers_are_refused(
    model: PreTrainedModel, tiny_model: Any
) -> None:
    attach_replay(model)
    with pytest.raises(UserError, match=r"experts of shape \(4, 2\), but the model has \(3, 2\)"):
        set_routes(model, torch.zeros(7, 4, CHOSEN, dtype=torch.int32))
    with pytest.raises(UserError, match=r"trainer\.router_replay: the routers of qwen3 cannot be replayed"):
        attach_replay(tiny_model("qwen3"))


def test_routers_with_other_scores_are_refused_although_they_have_the_same_attributes(tiny_model: Any) -> None:
    model = tiny_model(
        "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=0, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, moe_intermediate_size=16, n_shared_experts=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"the routers of deepseek_v3 cannot be replayed"):
        attach_replay(model)


def test_a_model_whose_parameters_are_read_later_replays_and_is_refused_in_the_same_way(
    tiny_model: Any, tmp_path: Path
) -> None:
    settings = TrainerSettings(router_replay=True)
    setup = Setup(settings, 1.0, 1, AttentionChoice("sdpa", "test"), Ranks.alone())
    for family, expected in (("qwen3", pytest.raises(UserError, match="qwen3 cannot be replayed")),
                             ("qwen3_moe", contextlib.nullcontext())):  # fmt: skip
        folder = tmp_path / family
        folder.mkdir()
        write_model(tiny_model(family, **({} if family == "qwen3" else MIXTURE)), folder, dtype="float32")
        model = outline(folder)
        with expected:
            ready_outline(model, setup)
            with pytest.raises(UserError, match="the engine recorded experts of shape"):
                set_routes(model, torch.zeros(7, 9, CHOSEN, dtype=torch.int32))
