"""Tensors as one file: complete and right however little the system writes at a time, with the facts of its bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer.weights import tensor_file
from trainer.weights.tensor_file import write_tensors

TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7), "half": torch.arange(3).bfloat16(),
    "none": torch.empty(0, 4), "scalar": torch.tensor(7, dtype=torch.int64),
}  # fmt: skip


class Slow:
    """A file that takes a few bytes at a time, as the system may."""

    def __init__(self, file: Any, most: int, sizes: list[int]) -> None:
        self._file, self._most, self._sizes = file, most, sizes

    def close(self) -> None:
        self._file.close()

    def write(self, data: memoryview) -> int:
        self._sizes.append(len(data))
        return int(self._file.write(data[: self._most]))


@pytest.mark.parametrize("most", [1, 16, 10_000])
@pytest.mark.parametrize("piece", [5, 1 << 20])
def test_file_holds_the_tensors_and_facts_are_those_of_its_bytes(
    tmp_path: Path, most: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, sizes = tmp_path / "w.safetensors", list[int]()
    honest, asked = Path.open, list[tuple[Any, ...]]()

    def slowly(path: Path, mode: str, buffering: int = -1) -> Slow:
        asked.append((mode, buffering))
        return Slow(honest(path, mode, buffering=buffering), most, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", slowly)
        patch.setattr(tensor_file, "PIECE_BYTES", piece)
        facts = write_tensors(file, TENSORS)
    assert asked == [("wb", 0)], "nothing is copied into a buffer first"
    assert max(sizes) <= max(piece, 0) or piece > 1000
    data = file.read_bytes()
    assert facts == (len(data), hashlib.sha256(data).hexdigest())
    found = load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
