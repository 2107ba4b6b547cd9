"""Replayed routes are the recorded ones, bit for bit; tokens without a record and other passes are routed as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.model.attention import AttentionChoice, attach
from trainer.model.experts import attach_experts
from trainer.model.logprobs import token_logprobs
from trainer.model.packed import PackedSequences
from trainer.model.router_replay import attach_replay, set_routes

LENGTHS, LAYERS, CHOSEN, EXPERTS = (9, 30, 5), 3, 2, 6


@pytest.fixture
def model(tiny_model: Any) -> PreTrainedModel:
    """The second layer is dense."""
    made = tiny_model(
        "qwen3_moe", num_key_value_heads=2, num_hidden_layers=LAYERS, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
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
