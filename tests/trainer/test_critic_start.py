"""How a critic comes to be, and when there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_like.errors import UserError
from trainer.backends.port import Setup
from trainer.backends.torch_descriptor import TORCH
from trainer.config import AdvantageSettings, CriticSettings, OptimizerSettings, TrainerSettings
from trainer.critic_start import make_critic
from trainer.critic_state import critic_parts, write_critic
from trainer.gathered import gathered
from trainer.host_copy import HostCopy
from trainer.model.attention import AttentionChoice, is_attached
from trainer.ranks import Ranks


def setup_of(critic: CriticSettings | None) -> Setup:
    advantage = AdvantageSettings(kind="gae" if critic else "grpo")
    settings = TrainerSettings(critic=critic, advantage=advantage, optimizer=OptimizerSettings(lr=1e-3))
    return Setup(settings, 1.0, num_steps=5, attention=AttentionChoice("sdpa", "test"), ranks=Ranks.alone())


def test_without_the_section_there_is_none_whatever_the_backend_can_do(prepared: Path) -> None:
    backend: Any = SimpleNamespace(name="mine", trains_critics=False)
    assert make_critic(backend, setup_of(None), prepared, None, device="cpu") is None


def test_a_backend_that_trains_none_is_a_user_error(prepared: Path) -> None:
    backend: Any = SimpleNamespace(name="mine", trains_critics=False)
    with pytest.raises(UserError) as raised:
        make_critic(backend, setup_of(CriticSettings()), prepared, None, device="cpu")
    assert str(raised.value) == (
        "trainer.critic: mine cannot train a critic -> set trainer.backend to a backend that trains "
        "critics, or set trainer.critic: null"
    )


def test_a_new_critic_begins_at_zero_with_an_optimizer_of_its_own_and_attends_packed(prepared: Path) -> None:
    settings = CriticSettings(optimizer=OptimizerSettings(lr=0.5))
    critic = make_critic(TORCH, setup_of(settings), prepared, None, device="cpu")
    assert critic is not None
    assert critic.settings is settings
    assert is_attached(critic.backend.model)
    assert critic.backend.model.get_output_embeddings().weight.abs().sum() == 0
    for parameter in critic.backend.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert critic.backend.update(1).lr == 0.5


def test_a_critic_of_a_checkpoint_has_its_weights(prepared: Path, tmp_path: Path) -> None:
    setup = setup_of(CriticSettings(optimizer=OptimizerSettings(lr=0.5)))
    first = make_critic(TORCH, setup, prepared, None, device="cpu")
    assert first is not None
    for parameter in first.backend.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.backend.update(1)
    copied = HostCopy().take(critic_parts(first.backend))
    with gathered(copied, None, 1 << 20) as tensors:
        assert list(write_critic(tmp_path, tensors)) == ["critic.safetensors"]
    again = make_critic(TORCH, setup, prepared, tmp_path, device="cpu")
    assert again is not None
    expected = first.backend.model.state_dict()
    for name, tensor in again.backend.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert expected["lm_head.weight"].abs().min() > 0
