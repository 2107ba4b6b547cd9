"""Claims about export and import: both ways keep every bit, and what cannot be converted is said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.errors import UserError, WeightError
from trainer.checkpoints import checkpoint, convert
from trainer.checkpoints.convert import export_checkpoint, import_folder, narrowed, widened

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_folder(folder: Path, dtype: str = "bfloat16", *, shards: int = 1) -> dict[str, torch.Tensor]:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.layers.{i}.weight": torch.randn(5, 3, generator=generator).to(DTYPES[dtype]) for i in range(4)}
    tensors |= {"model.steps": torch.arange(3), "model.norm.weight": torch.ones(7).to(DTYPES[dtype])}
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "qwen3", "torch_dtype": dtype, "hidden_size": 3, "rope": {"theta": 1e6}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return tensors


def assert_same(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape
        assert found[name].view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shards", [1, 3])
def test_import_and_export_give_back_every_bit(dtype: str, shards: int, tmp_path: Path) -> None:
    tensors = model_folder(tmp_path / "hf", dtype, shards=shards)
    assert import_folder(tmp_path / "hf", tmp_path / "ours") == (len(tensors), dtype)
    checkpoint.verify(tmp_path / "ours")
    assert checkpoint.read_state(tmp_path / "ours").version == 0
    floats = {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()}
    assert floats == {torch.float32, torch.int64}
    assert export_checkpoint(tmp_path / "ours", tmp_path / "out") == dtype
    assert_same(tmp_path / "out", tensors)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "qwen3", "dtype": dtype, "hidden_size": 3, "rope": {"theta": 1e6}}


def test_numbers_that_are_none_and_the_smallest_ones_keep_their_bits(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(256, 256)
    save_file({"w": every.contiguous()}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert torch.equal(found.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_torchs_own(dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(5000, generator=generator) * 10.0**e for e in (-40, -6, 0, 4, 38)])
    values = torch.cat([values, torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])])
    ours = torch.frombuffer(bytearray(narrowed(values.numpy(), convert.NAMES[dtype])), dtype=DTYPES[dtype])
    theirs = values.to(DTYPES[dtype])
    is_number = ~values.isnan()
    assert torch.equal(ours[is_number].view(torch.int16), theirs[is_number].view(torch.int16))
    assert ours[~is_number].isnan().all()
    wide = widened(theirs.view(torch.int16).numpy().tobytes(), convert.NAMES[dtype])
    assert np.array_equal(wide, theirs.float().numpy(), equal_nan=True)


def test_damaged_checkpoint_is_not_exported_and_nothing_is_left(tmp_path: Path) -> None:
    model_folder(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    file = tmp_path / "ours" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(WeightError, match=r"model\.safetensors is damaged"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_the_users_mistake_in_one_sentence(tmp_path: Path) -> None:
    model_folder(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="the folder contains no weights"):
        import_folder(tmp_path / "empty", tmp_path / "a")
    (tmp_path / "empty" / "pytorch_model.bin").write_text("")
    with pytest.raises(
        UserError, match=r"the weights of the model are in pytorch_model\.bin, but only safetensors files can be read"
    ):
        import_folder(tmp_path / "empty", tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("")
    with pytest.raises(UserError, match="the path exists and is not an empty folder"):
        import_folder(tmp_path / "hf", tmp_path / "a")
    save_file({"w": torch.ones(2), "v": torch.ones(2).bfloat16()}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(UserError, match="the weights have several dtypes, or one that is not supported: BF16, F32"):
        import_folder(tmp_path / "empty", tmp_path / "b")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        import_folder(tmp_path / "empty", tmp_path / "b")
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: the file is missing or not a JSON object"):
        import_folder(tmp_path / "hf", tmp_path / "b")
    assert not (tmp_path / "b").exists()
