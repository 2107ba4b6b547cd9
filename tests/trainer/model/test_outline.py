"""Claims about models without parameters, and about reading parameters in parts: the bits of a full load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import trainer.model.outline
from areal_like.errors import WeightError
from trainer.checkpoints.convert import stored_optimizer
from trainer.export import first_named, write_model
from trainer.host_copy import Items
from trainer.model.model import load_causal_lm
from trainer.model.outline import moment_reader, outline, sliced_source

FAMILIES = ("qwen3", "llama", "cohere", "nanochat", "gemma2", "gpt2", "olmo2")


@pytest.fixture
def written(tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]) -> Callable[..., Path]:
    def write(family: str = "qwen3", dtype: Any = "float32", **changes: Any) -> Path:
        folder = tmp_path / f"{family}-{dtype}"
        folder.mkdir()
        write_model(tiny_model(family, **changes), folder, dtype=dtype)
        return folder

    return write


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
def test_any_range_of_any_parameter_has_the_bits_of_a_full_load(family: str, is_tied: bool, written: Any) -> None:
    folder = written(family, tie_word_embeddings=is_tied)
    model, whole = outline(folder), load_causal_lm(folder)
    source = sliced_source(folder, model, 1)  # the smallest piece, 1024 bytes
    assert source is not None
    expected = first_named(whole)
    assert first_named(model).keys() == expected.keys()
    for name, tensor in expected.items():
        first, last = tensor.numel() // 3, tensor.numel() - tensor.numel() // 4
        found = torch.empty(last - first)
        source.read(name, first, found)
        assert torch.equal(found, tensor.detach().reshape(-1)[first:last]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_are_in_no_file_are_computed_and_parameters_take_no_memory(family: str, written: Any) -> None:
    folder = written(family)
    model, whole = outline(folder), load_causal_lm(folder)
    in_files = whole.state_dict().keys()
    expected = {name: buffer for name, buffer in whole.named_buffers() if name not in in_files}
    found = {name: buffer for name, buffer in model.named_buffers() if name not in in_files}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training


def test_tied_parameters_are_one(written: Any) -> None:
    model = outline(written(tie_word_embeddings=True))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("piece_bytes", [1, 5000, 1 << 20])
def test_columns_of_rows_have_the_bits_of_a_full_load(dtype: str, piece_bytes: int, written: Any) -> None:
    folder = written(dtype=dtype)
    model, full = outline(folder), load_causal_lm(folder)
    source = sliced_source(folder, model, piece_bytes)
    assert source is not None
    name = "model.layers.1.mlp.down_proj.weight"
    weight = first_named(full)[name]
    rows, row_items = weight.shape
    out = torch.empty(rows - 5, row_items // 2)
    source.read(name, 3 * row_items + row_items // 2, out, row_items // 2)
    assert torch.equal(out, weight[3:-2, row_items // 2 :])


def test_16_bit_files_are_read_as_float32(written: Any) -> None:
    folder = written(dtype="bfloat16")
    source = sliced_source(folder, outline(folder), 1 << 20)
    assert source is not None
    for name, tensor in first_named(load_causal_lm(folder)).items():
        found = torch.empty(tensor.shape)
        source.read(name, 0, found)
        assert torch.equal(found, tensor), name


def test_weights_in_several_files_are_found(written: Any) -> None:
    folder = written()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    source = sliced_source(folder, outline(folder), 1 << 20)
    assert source is not None
    for name, tensor in tensors.items():
        found = torch.empty(tensor.shape)
        source.read(name, 0, found)
        assert torch.equal(found, tensor), name


def change(folder: Path, work: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write the weights again, changed by `work`."""
    tensors = load_file(folder / "model.safetensors")
    work(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "work",
    [
        lambda tensors: tensors.pop("model.norm.weight"),
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}),
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}),
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(61, 32)}),
    ],
    ids=["missing", "misshapen", "no-float", "tied-twice"],
)
def test_a_folder_that_does_not_fit_is_left_to_the_full_load(work: Any, written: Any) -> None:
    folder = written(tie_word_embeddings=True)
    change(folder, work)
    assert sliced_source(folder, outline(folder), 1 << 20) is None


def test_a_model_that_is_converted_when_it_is_loaded_is_not_read_in_parts(written: Any) -> None:
    experts = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    folder = written("qwen3_moe", **experts)
    assert sliced_source(folder, outline(folder), 1 << 20) is None


def test_a_file_that_was_cut_short_meanwhile_is_an_error_of_the_weights(written: Any) -> None:
    folder = written()
    file = folder / "model.safetensors"
    model = outline(folder)
    source = sliced_source(folder, model, 1 << 20)
    assert source is not None
    last = max(load_last(folder), key=lambda one: one[1])[0]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WeightError, match="is truncated"):
        source.read(last, 0, torch.empty(first_named(model)[last].shape))


def load_last(folder: Path) -> list[tuple[str, int]]:
    """Names and offsets of the tensors in the file."""
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [(name, entry["data_offsets"][0]) for name, entry in header.items() if name != "__metadata__"]


def test_moments_are_read_whole_or_in_parts(tmp_path: Path) -> None:
    moment, step = torch.randn(6, 4), torch.tensor(3.0)
    save_file({"exp_avg/a": moment, "step/a": step}, tmp_path / "optimizer.safetensors")
    read = moment_reader(stored_optimizer(tmp_path), {"a": ["exp_avg", "step"]})
    whole = read("a", None)
    assert torch.equal(whole["exp_avg"], moment)
    part = read("a", Items(8, 8))
    assert torch.equal(part["exp_avg"], moment[2:4].reshape(-1))
    columns = read("a", Items(2 * 4 + 1, 6, 2))
    assert torch.equal(columns["exp_avg"], moment[2:5, 1:3].reshape(-1))
    assert part["step"].shape == whole["step"].shape == ()
    assert float(part["step"]) == 3.0
    assert read("b", None) == {}


def test_float32_on_the_host_is_read_in_one_piece_however_small_pieces_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"exp_avg/a": torch.randn(3000)}, tmp_path / "optimizer.safetensors")
    sizes: list[int] = []
    fill = trainer.model.outline.fill
    monkeypatch.setattr(
        trainer.model.outline, "fill", lambda file, view, path: (sizes.append(len(view)), fill(file, view, path))
    )
    moment_reader(stored_optimizer(tmp_path), {"a": ["exp_avg"]})("a", Items(10, 2990))
    assert sizes == [4 * 2990]
