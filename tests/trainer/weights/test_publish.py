"""Claims about published versions: the bits, the names, the dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from areal_like.weights.weight_store import WeightStore, open_payload, verify
from trainer.weights.publish import publish_version, tensor_bytes


def read_back(manifest_path: Path) -> dict[str, torch.Tensor]:
    manifest, payload = open_payload(manifest_path)
    verify(manifest, payload)
    dtypes = {entry.name: (getattr(torch, entry.dtype), entry.shape) for entry in manifest.tensors}
    return {
        name: torch.frombuffer(bytearray(payload[name]), dtype=dtype).reshape(shape)
        for name, (dtype, shape) in dtypes.items()
    }


@pytest.mark.parametrize("kind", ["shm", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_bits_are_the_parameters_in_the_asked_dtype(
    kind: Literal["shm", "disk"],
    dtype: Literal["float32", "bfloat16"],
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
) -> None:
    model = tiny_model()
    manifest = publish_version(WeightStore(tmp_path, kind, 2), model, 3, "l1", dtype=dtype)
    tensors = read_back(manifest)
    assert set(tensors) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], parameter.to(getattr(torch, dtype)))


def test_later_updates_do_not_touch_a_published_version(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = tiny_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    manifest = publish_version(WeightStore(tmp_path, "shm", 2), model, 0, "l0", dtype="float32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in read_back(manifest).items())


def test_tied_head_is_published_once(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    manifest = publish_version(WeightStore(tmp_path, "shm", 2), model, 0, "l0", dtype="float32")
    tensors = read_back(manifest)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors


def test_disk_payload_is_plain_safetensors(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model()
    manifest_path = publish_version(WeightStore(tmp_path, "disk", 2), model, 0, "l0", dtype="bfloat16")
    manifest, _ = open_payload(manifest_path)
    tensors = load_file(str(tmp_path / manifest.payload))
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.zeros(0, 4), torch.arange(6).reshape(2, 3).t()])
def test_odd_tensors_become_bytes_in_c_order(tensor: torch.Tensor) -> None:
    raw = tensor_bytes(tensor)
    assert raw.shape == tuple(tensor.shape)
    assert bytes(raw.data) == tensor.contiguous().numpy().tobytes()
