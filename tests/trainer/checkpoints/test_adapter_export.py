"""Exports of a checkpoint with an adapter, on made-up tensors: exact sums in every type, and every refusal."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError, WeightError
from trainer.checkpoints import checkpoint
from trainer.checkpoints.adapter_export import export_adapter, holds_adapter
from trainer.checkpoints.checkpoint import CheckpointState, Retention
from trainer.weights.publish import tensor_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANK, ALPHA = 4, 2


def tensors_of_base(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.up.weight": (6, 5), "layer.up.bias": (6,), "layer.down.weight": (5, 6), "norm.weight": (5,)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def tensors_of_adapter() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"lora_A": (RANK, 5), "lora_B": (6, RANK)}
    return {
        f"base_model.model.layer.up.{part}.weight": torch.randn(*shape, generator=generator)
        for part, shape in shapes.items()
    }


def write_base(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))


def saved(
    tmp_path: Path, base: Mapping[str, torch.Tensor], *, recorded: str = "float32", origin: str = "float32"
) -> Path:
    """A checkpoint whose adapter belongs to `base`, which is in tmp_path / base; recorded: the type of its CRCs."""
    write_base(tmp_path / "base", base)
    crc32 = {name: zlib.crc32(tensor_bytes(one.to(DTYPES[recorded])).data) for name, one in base.items()}

    def write(folder: Path) -> None:
        save_file(tensors_of_adapter(), folder / "adapter_model.safetensors")
        config = {"base_model_name_or_path": str(tmp_path / "base"), "lora_alpha": ALPHA, "r": RANK}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_base.json").write_text(json.dumps({"dtype": recorded, "crc32": crc32}))
        (folder / "tokenizer.json").write_text("{}")

    state = CheckpointState(version=3, lineage="l", run_id="r", config_digest="", origin_dtype=origin)
    return checkpoint.save(tmp_path / "run", state, write, Retention(keep=1))[0]


def merged(base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    adapter = {name.split(".")[-2]: tensor for name, tensor in tensors_of_adapter().items()}
    sums = {name: tensor.float() for name, tensor in base.items()}
    sums["layer.up.weight"] = sums["layer.up.weight"] + (adapter["lora_B"] @ adapter["lora_A"]) * (ALPHA / RANK)
    return sums


@pytest.mark.parametrize("origin", list(DTYPES))
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_merged_weights_are_base_plus_scale_b_a_in_the_type_asked_for_or_the_models_own(
    tmp_path: Path, origin: str, dtype: str | None
) -> None:
    base = tensors_of_base(DTYPES[origin])
    folder = saved(tmp_path, base, origin=origin)
    wanted = dtype or origin
    assert export_adapter(folder, tmp_path / "out", form="merged", dtype=dtype) == wanted
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == base.keys()
    for name, tensor in merged(base).items():
        assert found[name].dtype == DTYPES[wanted]
        assert found[name].shape == tensor.shape
        if name == "layer.up.weight":
            torch.testing.assert_close(found[name].float(), tensor, atol=1e-6, rtol=0 if wanted == "float32" else 0.01)
        else:
            assert torch.equal(found[name], tensor.to(DTYPES[wanted])), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": wanted}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "provenance.json"
    }  # fmt: skip


def test_the_adapter_alone_needs_no_base(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors_of_base())
    (tmp_path / "base").rename(tmp_path / "gone")
    assert export_adapter(folder, tmp_path / "out", form="adapter", dtype="bfloat16") == "bfloat16"
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "provenance.json"}
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == tensors_of_adapter().keys()
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in tensors_of_adapter().items())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == RANK


@pytest.mark.parametrize("recorded", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", list(DTYPES))
def test_the_base_is_recognised_in_the_type_that_versions_had(tmp_path: Path, recorded: str, stored: str) -> None:
    base = tensors_of_base(DTYPES[stored])
    folder = saved(tmp_path, base, recorded=recorded)
    export_adapter(folder, tmp_path / "out", form="merged")
    base["norm.weight"][0] += 0.5
    write_base(tmp_path / "base", base)
    with pytest.raises(UserError) as raised:
        export_adapter(folder, tmp_path / "again", form="merged")
    assert str(raised.value) == (
        f"{tmp_path / 'base'}: this model is not the base model that the adapter was trained on: norm.weight differs"
        " -> restore the model in this folder, or use --lora adapter"
    )
    assert not (tmp_path / "again").exists()


def test_tensors_that_no_version_had_are_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors_of_base())
    write_base(tmp_path / "base", {**tensors_of_base(), "rotary.inv_freq": torch.ones(2)})
    export_adapter(folder, tmp_path / "out", form="merged")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors_of_base().keys()


def test_a_base_that_is_gone_or_has_other_names_says_what_to_do(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors_of_base())
    write_base(tmp_path / "base", {name: one for name, one in tensors_of_base().items() if name != "norm.weight"})
    with pytest.raises(UserError) as raised:
        export_adapter(folder, tmp_path / "out", form="merged")
    assert str(raised.value) == (
        f"{tmp_path / 'base'}: the files of this model do not contain norm.weight: this is a different model, or "
        "transformers converts the tensors when it loads the model -> use --lora adapter, or use RUN/final, which is "
        "already merged"
    )
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(UserError) as raised:
        export_adapter(folder, tmp_path / "out", form="merged")
    assert str(raised.value) == (
        f"{tmp_path / 'base'}: the base model of the adapter no longer exists"
        " -> restore the model in this folder, or use --lora adapter"
    )


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_a_damaged_checkpoint_and_a_filled_folder_are_refused(tmp_path: Path, form: str) -> None:
    folder = saved(tmp_path, tensors_of_base())
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="the path exists and is not an empty folder"):
        export_adapter(folder, tmp_path / "filled", form=form)  # type: ignore[arg-type]
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(WeightError, match=r"adapter_model\.safetensors is damaged"):
        export_adapter(folder, tmp_path / "out", form=form)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_base.json"])
@pytest.mark.parametrize("content", ["{", None])
def test_a_description_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, tensors_of_base())
    monkeypatch.setattr(checkpoint, "verify", lambda folder: None)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(WeightError) as raised:
        export_adapter(folder, tmp_path / "out", form="merged")
    assert str(raised.value).startswith(f"{folder / name} cannot be read (")
    assert str(raised.value).endswith("); restore the file, or export a different checkpoint")
    assert str(raised.value).count(name) == 1


def test_a_checkpoint_holds_an_adapter_where_its_file_is(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors_of_base())
    assert holds_adapter(folder) is True
    assert holds_adapter(tmp_path / "base") is False
