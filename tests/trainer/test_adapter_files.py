"""An adapter as files: the exact configuration that peft and engines read, and what is refused when it is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from areal_like.errors import UserError, WeightError
from areal_like.weights.adapter import peft_name
from areal_like.weights.adapter_folder import base_problem, read_adapter
from trainer.adapter_files import AdapterFiles, BaseIdentity, load_adapter
from trainer.config import AdapterSettings
from trainer.export import named_tensors
from trainer.model.lora import add_adapter, is_adapters

MakeModel = Callable[..., PreTrainedModel]
BASE = BaseIdentity("/models/base", "float32", {"w": 3})
SETTINGS = AdapterSettings(rank=4, alpha=8.0, targets=("q_proj", "up_proj"))


def with_adapter(model: PreTrainedModel, settings: AdapterSettings = SETTINGS, *, seed: int = 1) -> PreTrainedModel:
    """With random A and B."""
    add_adapter(model, settings, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapters(name):
            parameter.data.normal_(generator=generator)
    return model


@pytest.fixture
def saved(tmp_path: Path, tiny_model: MakeModel) -> Path:
    """The folder of an adapter that was saved."""
    model = with_adapter(tiny_model())
    AdapterFiles.of(model, SETTINGS, BASE).write(tmp_path, named_tensors(model))
    return tmp_path


def test_the_configuration_is_word_for_word_what_peft_reads(saved: Path) -> None:
    expected = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "/models/base", "r": 4,
        "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "use_rslora": False, "modules_to_save": None, "inference_mode": True,
    }  # fmt: skip
    assert (saved / "adapter_config.json").read_text() == json.dumps(expected, indent=2) + "\n"


def test_engines_read_the_folder_as_an_adapter_on_the_model(saved: Path, tiny_model: MakeModel) -> None:
    found = read_adapter(saved)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(tiny_model()).items()}
    assert base_problem(found, shapes) is None
    assert (found.rank, found.scale) == (4, 2.0)
    assert {module.rpartition(".")[2] for module in found.shapes} == {"q_proj", "up_proj"}


def test_an_alpha_that_is_no_whole_number_is_written_as_it_is(tiny_model: MakeModel) -> None:
    settings = SETTINGS.model_copy(update={"alpha": 2.5})
    files = AdapterFiles.of(with_adapter(tiny_model(), settings), settings, BASE)
    assert json.loads(files.config_json)["lora_alpha"] == 2.5
    assert '"lora_alpha": 8,' in AdapterFiles.of(with_adapter(tiny_model()), SETTINGS, BASE).config_json


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        (("all-linear",), ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (("up_proj", "k_proj"), ["k_proj", "up_proj"]),
        (("layers.1.mlp.up_proj", "layers.0.self_attn.q_proj"),
         ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]),
    ],
)  # fmt: skip
def test_ends_of_names_stand_for_targets_only_where_they_mean_no_other_module(
    tiny_model: MakeModel, targets: tuple[str, ...], written: list[str]
) -> None:
    settings = AdapterSettings(rank=2, alpha=4.0, targets=targets)
    config = json.loads(AdapterFiles.of(with_adapter(tiny_model(), settings), settings, BASE).config_json)
    assert config["target_modules"] == written


def test_the_folder_has_the_adapter_alone_and_names_its_base(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = with_adapter(tiny_model())
    facts = AdapterFiles.of(model, SETTINGS, BASE).write(tmp_path, named_tensors(model))
    assert {file.name for file in tmp_path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"
    }  # fmt: skip
    assert json.loads((tmp_path / "adapter_base.json").read_text()) == {"dtype": "float32", "crc32": {"w": 3}}
    assert list(facts) == ["adapter_model.safetensors"]
    own = {name: tensor for name, tensor in named_tensors(model).items() if is_adapters(name)}
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored.keys() == {peft_name(name) for name in own}
    assert all(torch.equal(stored[peft_name(name)], tensor) for name, tensor in own.items())


def test_what_was_saved_is_read_back_bit_for_bit_and_stays_trainable(saved: Path, tiny_model: MakeModel) -> None:
    expected, model = named_tensors(with_adapter(tiny_model())), with_adapter(tiny_model(), seed=2)
    load_adapter(saved, model, SETTINGS, BASE)
    loaded = named_tensors(model)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(filter(is_adapters, loaded))


@pytest.mark.parametrize("change_of", [{"rank": 2, "alpha": 8.0}, {"targets": ("q_proj",)}, {"targets": ("k_proj",)}])
def test_an_adapter_of_another_rank_or_on_other_modules_is_not_loaded(
    saved: Path, tiny_model: MakeModel, change_of: dict[str, Any]
) -> None:
    settings = SETTINGS.model_copy(update=change_of)
    model = with_adapter(tiny_model(), settings)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with pytest.raises(UserError) as raised:
        load_adapter(saved, model, settings, BASE)
    assert str(raised.value) == (
        f"{saved}: the checkpoint's adapter has a different rank or different target modules than trainer.lora"
        " -> use the run's original trainer.lora (rank 4, targets q_proj, up_proj), or start a new run"
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(model).items())
    (saved / "adapter_config.json").write_text('{"lora_alpha": 8}')
    with pytest.raises(UserError, match=r"the run's original trainer\.lora \(adapter_config\.json is damaged\)"):
        load_adapter(saved, model, settings, BASE)


@pytest.mark.parametrize("other", [BaseIdentity("/b", "bfloat16", {"w": 3}), BaseIdentity("/b", "float32", {"w": 4})])
def test_an_adapter_is_not_loaded_on_another_base(saved: Path, tiny_model: MakeModel, other: BaseIdentity) -> None:
    model = with_adapter(tiny_model())
    with pytest.raises(UserError) as raised:
        load_adapter(saved, model, SETTINGS, other)
    assert str(raised.value) == (
        f"{saved}: the adapter in the checkpoint was not trained on the base model /b"
        " -> resume with the model and model.dtype that the run started with"
    )
    load_adapter(saved, model, SETTINGS, BaseIdentity("/moved", "float32", {"w": 3}))


def test_an_adapter_of_another_alpha_is_not_loaded(saved: Path, tiny_model: MakeModel) -> None:
    settings = SETTINGS.model_copy(update={"alpha": 2.5})
    with pytest.raises(UserError) as raised:
        load_adapter(saved, with_adapter(tiny_model(), settings), settings, BASE)
    assert str(raised.value) == (
        f"{saved}: the checkpoint's adapter has alpha 8, but trainer.lora.alpha is 2.5"
        " -> set trainer.lora.alpha=8, or start a new run"
    )


@pytest.mark.parametrize("name", ["adapter_base.json", "adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", ["", "[]", "{}", None])
def test_a_damaged_file_is_named(saved: Path, tiny_model: MakeModel, name: str, content: str | None) -> None:
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_text(content)
    with pytest.raises(WeightError) as raised:
        load_adapter(saved, with_adapter(tiny_model()), SETTINGS, BASE)
    assert str(raised.value).startswith(f"{saved / name} cannot be read (")
