"""Claims about what comes back out of a checkpoint: generators on any machine, and only the model it was made of."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError, WeightError
from trainer import training_state as module
from trainer.export import write_model
from trainer.gathered import gathered
from trainer.host_copy import HostCopy, whole_part
from trainer.training_state import (
    OPTIMIZER,
    ModelFiles,
    check_architecture,
    generator_states,
    restore_generators,
    restore_training_state,
    torch_generators,
    write_training_state,
)


@pytest.fixture(autouse=True)
def quiet_generators() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class FakeBackend:
    """Takes moments of one parameter."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.w = torch.nn.Parameter(torch.zeros(2))
        self.model.unseen = torch.nn.Parameter(torch.zeros(2))
        self.moments: dict[str, dict[str, torch.Tensor]] = {}

    def load_moments(self, read: Any) -> None:
        self.moments = {name: read(name) for name, _ in self.model.named_parameters()}


def written(folder: Path, **more: torch.Tensor) -> None:
    moments = {"exp_avg/w": torch.ones(2), "step/w": torch.tensor(3.0)}
    save_file({**moments, "generator/cpu": torch.get_rng_state(), **more}, folder / OPTIMIZER)


def test_moments_come_back_by_kind_and_a_parameter_that_was_never_updated_has_none(tmp_path: Path) -> None:
    written(tmp_path)
    backend = FakeBackend()
    restore_training_state(tmp_path, backend)  # type: ignore[arg-type]
    assert backend.moments["unseen"] == {}
    assert {kind: value.tolist() for kind, value in backend.moments["w"].items()} == {"exp_avg": [1, 1], "step": 3}


def test_torchs_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    written(tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(99)
    restore_training_state(tmp_path, FakeBackend())  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("is_available", "num_devices", "is_restored"), [(True, 2, True), (True, 1, False), (False, 2, False)]
)
def test_generators_of_gpus_are_restored_where_there_are_as_many(
    is_available: bool, num_devices: int, is_restored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.append)
    states = {f"generator/cuda{index}": torch.full((4,), index, dtype=torch.uint8) for index in (0, 1)}
    written(tmp_path, **states)
    restore_training_state(tmp_path, FakeBackend())  # type: ignore[arg-type]
    assert [[int(state[0]) for state in one] for one in taken] == ([[0, 1]] if is_restored else [])


def test_generators_of_gpus_are_in_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(torch_generators()) == {"generator/cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(1), torch.ones(1)])
    assert set(torch_generators()) == {"generator/cpu", "generator/cuda0", "generator/cuda1"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            {"exp_avg/other": torch.ones(2)},
            "belongs to a different model: the model of this run has no parameter other",
        ),
        (None, "cannot be read"),
    ],
)
def test_file_of_another_model_or_none_is_refused(damage: Any, words: str, tmp_path: Path) -> None:
    written(tmp_path, **(damage or {}))
    if damage is None:
        (tmp_path / OPTIMIZER).write_bytes(b"nothing")
    with pytest.raises(WeightError, match=words):
        restore_training_state(tmp_path, FakeBackend())  # type: ignore[arg-type]


def test_file_without_a_generator_is_refused(tmp_path: Path) -> None:
    save_file({"step/w": torch.ones(1)}, tmp_path / OPTIMIZER)
    with pytest.raises(WeightError, match="contains no random generator state"):
        restore_training_state(tmp_path, FakeBackend())  # type: ignore[arg-type]


def test_pythons_and_numpys_generators_go_on_where_they_were_and_unknown_states_change_nothing() -> None:
    states = json.loads(json.dumps(generator_states()))
    expected = random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()
    restore_generators(states)
    assert (random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()) == expected
    before = random.getstate(), np.random.get_state()[1].tolist()
    restore_generators({})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_weights_and_the_rest_go_into_files_of_their_own(tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model()
    files = ModelFiles.of(model)
    target, source = tmp_path / "target", tmp_path / "source"
    target.mkdir()
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    weights = {f"weight/{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    parts = [whole_part(key, tensor) for key, tensor in {**weights, "exp_avg/a": torch.ones(3)}.items()]
    with gathered(HostCopy().take(parts), None, 1 << 10) as tensors:
        facts = write_training_state(target, tensors, {"generator/cpu": torch.zeros(2)}, files, source)
    assert set(load_file(target / "model.safetensors")) == set(model.state_dict())
    assert set(load_file(target / OPTIMIZER)) == {"exp_avg/a", "generator/cpu"}
    assert (target / "tokenizer.json").exists()
    config = json.loads((target / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], "float32")
    assert facts.keys() == {"model.safetensors", OPTIMIZER}
    assert all(facts[name][0] == (target / name).stat().st_size for name in facts)


# ---------------------------------------------------------------- architectures


def made(folder: Path, model: Any) -> Path:
    folder.mkdir()
    write_model(model, folder, dtype="float32")
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen2", {}, "model_type is qwen3 in the checkpoint and qwen2 in the run's model"),
        ("qwen3", {"num_hidden_layers": 1}, "num_hidden_layers is 2 in the checkpoint and 1 in the run's model"),
        ("qwen3", {"vocab_size": 99}, r"lm_head.weight is \[61, 32\] in the checkpoint and \[99, 32\] in the run's"),
    ],
)
def test_first_difference_of_an_architecture_is_named(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path, tiny_model: Any
) -> None:
    checkpoint = made(tmp_path / "a", tiny_model())
    check_architecture(checkpoint, made(tmp_path / "same", tiny_model(seed=5)))
    with pytest.raises(UserError, match=words) as raised:
        check_architecture(checkpoint, made(tmp_path / "b", tiny_model(family, **changes)))
    assert raised.value.where == str(checkpoint)


def test_prepared_folder_that_is_gone_is_not_compared(tmp_path: Path, tiny_model: Any) -> None:
    check_architecture(made(tmp_path / "a", tiny_model()), tmp_path / "gone")


def test_tensor_left_out_by_the_model_is_not_saved(tmp_path: Path) -> None:
    files = ModelFiles("{}", None, frozenset({"left"}))
    files.write(tmp_path, {"left": torch.ones(1), "kept": torch.ones(1)})
    assert set(load_file(tmp_path / module.WEIGHTS)) == {"kept"}


def test_a_model_is_held_only_where_its_tensors_have_other_names_on_disk(tiny_model: Any, tmp_path: Path) -> None:
    """Once it is spread over ranks, a reference to the whole one would keep its memory. Old names do not count."""
    made = tiny_model()
    assert ModelFiles.of(made).model is None
    write_model(made, tmp_path, dtype="float32")
    loaded = type(made).from_pretrained(str(tmp_path))
    assert ModelFiles.of(loaded).model is None
    loaded._weight_conversions = ["renamed"]
    assert ModelFiles.of(loaded).model is loaded
