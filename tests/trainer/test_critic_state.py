"""The critic's file in a checkpoint: what is in it, and what is refused when it is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError, WeightError
from trainer.critic_state import (
    critic_parts,
    is_critics,
    load_critic_weights,
    restore_critic_moments,
    write_critic,
)
from trainer.gathered import gathered
from trainer.host_copy import HostCopy, Part, whole_part


class PlayedBackend:
    """Has two parameters, one of which was never updated."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, torch.Tensor]] = {}

    def parts(self) -> list[Part]:
        return [whole_part("weight/w", torch.ones(2)), whole_part("exp_avg/w", torch.zeros(2))]

    def load_moments(self, read: Any) -> None:
        self.found = {name: read(name) for name in ("w", "v")}


@pytest.fixture
def backend() -> Any:
    """Played."""
    return PlayedBackend()


def test_keys_of_the_critic_are_no_keys_of_the_policy(backend: Any) -> None:
    parts = critic_parts(backend)
    assert [part.key for part in parts] == ["critic/weight/w", "critic/exp_avg/w"]
    assert torch.equal(parts[0].items, torch.ones(2))
    assert [is_critics(key) for key in ("critic/weight/w", "weight/w", "weight/critic/w")] == [True, False, False]


def test_only_the_critics_tensors_are_written_and_no_file_without_any(tmp_path: Path) -> None:
    policy, critic = whole_part("weight/w", torch.ones(2)), whole_part("critic/weight/w", torch.zeros(2))
    with gathered(HostCopy().take([policy]), None, 1 << 10) as tensors:
        assert write_critic(tmp_path, tensors) == {}
    assert list(tmp_path.iterdir()) == []
    with gathered(HostCopy().take([policy, critic]), None, 1 << 10) as tensors:
        facts = write_critic(tmp_path, tensors)
    file = tmp_path / "critic.safetensors"
    assert facts["critic.safetensors"].num_bytes == file.stat().st_size
    assert {name: tensor.tolist() for name, tensor in load_file(file).items()} == {"weight/w": [0.0, 0.0]}


def test_moments_come_back_by_parameter_without_weights_in_memory_of_their_own(tmp_path: Path, backend: Any) -> None:
    kinds = {"weight/w": torch.ones(2), "exp_avg/w": torch.full((2,), 3.0), "step/w": torch.tensor(4.0)}
    save_file({**kinds, "exp_avg/deep/name": torch.ones(1)}, tmp_path / "critic.safetensors")
    restore_critic_moments(tmp_path, backend)
    assert {kind: tensor.tolist() for kind, tensor in backend.found["w"].items()} == {
        "exp_avg": [3.0, 3.0],
        "step": 4.0,
    }
    assert backend.found["v"] == {}


@pytest.mark.parametrize("content", [b"", b"no tensors", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, backend: Any, content: bytes | None) -> None:
    file = tmp_path / "critic.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(WeightError) as raised:
        restore_critic_moments(tmp_path, backend)
    assert str(raised.value).startswith(f"{file} cannot be read (")
    model: Any = torch.nn.Linear(2, 1)
    with pytest.raises(WeightError if content is not None else UserError) as refused:
        load_critic_weights(tmp_path, model)
    if content is None:
        assert str(refused.value) == (
            f"{tmp_path}: the checkpoint contains no critic, because the run was trained without one"
            " -> remove trainer.critic, or start a new run from this policy"
        )
    else:
        assert str(refused.value).startswith(f"{file} cannot be read (")


def test_weights_are_those_of_the_file_and_names_must_be_the_models(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 1)
    stored = {"weight/weight": torch.tensor([[5.0, 6.0]]), "weight/bias": torch.tensor([7.0]), "step/x": torch.ones(1)}
    file = tmp_path / "critic.safetensors"
    save_file(stored, file)
    load_critic_weights(tmp_path, model)
    assert (model.weight.tolist(), model.bias.tolist()) == ([[5.0, 6.0]], [7.0])
    assert model.weight.requires_grad
    for change, where in (
        ({"weight/more": torch.ones(1)}, "more is only in the file"),
        ({"weight/bias": None}, "bias is only in the model"),
    ):
        save_file({key: value for key, value in {**stored, **change}.items() if value is not None}, file)
        with pytest.raises(WeightError) as raised:
            load_critic_weights(tmp_path, model)
        assert str(raised.value) == f"{file} belongs to a different model: the tensor {where}"
