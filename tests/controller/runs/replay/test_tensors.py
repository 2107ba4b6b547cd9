"""Claims about digests of tensors and the first difference between two folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from areal_like.errors import OperationError
from controller.runs.replay.tensors import compare_folders, digests_in, places_in, total


def folder_with(root: Path, **files: dict[str, torch.Tensor]) -> Path:
    root.mkdir()
    for name, tensors in files.items():
        save_file(tensors, root / f"{name}.safetensors", {"format": "pt"})
    return root


def test_equal_tensors_have_equal_digests_whatever_their_order_and_metadata(tmp_path: Path) -> None:
    one, two = torch.arange(6.0).view(2, 3), torch.ones(3, dtype=torch.int64)
    there = folder_with(tmp_path / "a", model={"w": one, "b": two})
    here = tmp_path / "b"
    here.mkdir()
    save_file({"b": two, "w": one.clone()}, here / "model.safetensors")
    difference, digests = compare_folders(there, here)
    assert difference is None
    assert list(digests) == ["b", "w"]
    assert total(digests) == total(digests_in(there))


def test_shape_dtype_and_bits_count(tmp_path: Path) -> None:
    base = folder_with(tmp_path / "base", model={"w": torch.zeros(4)})
    for name, other, words in (
        ("shape", torch.zeros(2, 2), r"F32 [4] in the record, F32 [2, 2] in the replay"),
        ("dtype", torch.zeros(4, dtype=torch.int32), r"F32 [4] in the record, I32 [4] in the replay"),
        ("sign", torch.tensor([0.0, -0.0, 0.0, 0.0]), "1 of 4 values differ, by at most 0"),
        ("value", torch.tensor([0.0, 0.5, -2.0, 0.0]), "2 of 4 values differ, by at most 2"),
    ):
        difference, _ = compare_folders(base, folder_with(tmp_path / name, model={"w": other}))
        assert difference is not None
        assert (difference.name, difference.words) == ("w", words)


def test_dtype_that_numpy_lacks_is_compared_by_its_bits(tmp_path: Path) -> None:
    there = folder_with(tmp_path / "a", model={"w": torch.zeros(3, dtype=torch.bfloat16)})
    here = folder_with(tmp_path / "b", model={"w": torch.tensor([0, 0, 1], dtype=torch.bfloat16)})
    difference, _ = compare_folders(there, here)
    assert difference is not None
    assert difference.words == "1 of 3 values differ"


def test_tensor_that_only_one_has_is_named_and_generators_are_left_out(tmp_path: Path) -> None:
    seeds = {"generator/cpu": torch.tensor([1, 2], dtype=torch.uint8)}
    there = folder_with(tmp_path / "a", model={"w": torch.zeros(1)}, optimizer={"exp_avg/w": torch.zeros(1), **seeds})
    here = folder_with(tmp_path / "b", model={"w": torch.zeros(1)}, optimizer={"step/w": torch.zeros(1)})
    assert list(places_in(there)) == ["model: w", "optimizer: exp_avg/w"]
    difference, _ = compare_folders(there, here)
    assert difference is not None
    assert (difference.name, difference.words) == ("optimizer: exp_avg/w", "only one of the two has this tensor")


def test_split_model_equals_the_same_model_in_one_file(tmp_path: Path) -> None:
    whole = folder_with(tmp_path / "a", model={"v": torch.ones(2), "w": torch.zeros(2)})
    parts = {"model-00001-of-00002": {"v": torch.ones(2)}, "model-00002-of-00002": {"w": torch.zeros(2)}}
    assert compare_folders(whole, folder_with(tmp_path / "b", **parts))[0] is None


def test_damaged_file_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "a", model={"w": torch.zeros(8)})
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", b"\xff" * 20, whole[:4], whole[:-3]):
        file.write_bytes(damaged)
        with pytest.raises(OperationError, match=r"model\.safetensors"):
            digests_in(folder)
