"""A critic as a model: its head, and values that are products in float32 whatever the passes compute in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from trainer.model.attention import AttentionChoice, attach
from trainer.model.logprobs import hidden_states
from trainer.model.packed import PackedSequences
from trainer.model.values import load_critic, token_values


@pytest.fixture
def critic(prepared: Path) -> PreTrainedModel:
    """With a random head."""
    model = load_critic(prepared)
    torch.nn.init.normal_(model.get_output_embeddings().weight, generator=torch.Generator().manual_seed(1))
    attach(model, AttentionChoice("sdpa", "test"))
    return model


def test_the_head_gives_one_number_begins_at_zero_and_the_rest_is_the_policys(
    prepared: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model, policy = load_critic(prepared), tiny_model()
    head: Any = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    assert (tuple(head.weight.shape), head.out_features, head.bias) == ((1, 32), 1, None)
    assert head.weight.tolist() == [[0.0] * 32]
    assert head.weight.requires_grad
    theirs = policy.state_dict()
    ours = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head")}
    assert ours.keys() == {name for name in theirs if not name.startswith("lm_head")}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("is_half", [False, True])
def test_values_are_float32_products_of_hidden_states_and_head(
    critic: PreTrainedModel, sequences: Callable[..., Any], is_half: bool
) -> None:
    packed = PackedSequences.build(*sequences((7, 4, 9)))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        values_T = token_values(critic, packed)
        with torch.no_grad():
            hidden_TD = hidden_states(critic, packed).float().numpy()
    weight_D = critic.get_output_embeddings().weight.detach().numpy()[0]
    expected_T = (hidden_TD.astype(np.float64) * weight_D.astype(np.float64)).sum(-1)
    assert values_T.dtype == torch.float32
    assert tuple(values_T.shape) == (20,)
    np.testing.assert_allclose(values_T.detach().numpy(), expected_T, atol=1e-5)
    assert values_T.requires_grad
