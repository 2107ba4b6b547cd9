"""Creates a version in the weight store from a model's parameters.

It defines the names, dtype and bytes of a snapshot. Files, checksums and retention are in areal_like.weights;
versions are announced in worker.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from areal_like.settings import DType
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import WeightStore
from trainer.export import Policy, cast, named_tensors
from trainer.model.model import all_finite


def tensor_bytes(tensor: torch.Tensor) -> TensorBytes:
    """Return the tensor's bytes on the host; of a contiguous CPU tensor they are its own memory, not a copy."""
    host = tensor.detach().cpu().contiguous()
    data = memoryview(host.reshape(-1).view(torch.uint8).numpy().data)
    return TensorBytes(str(host.dtype).removeprefix("torch."), tuple(host.shape), data)


def snapshot(model: Policy, *, dtype: DType) -> dict[str, TensorBytes]:
    """Copy the policy to host memory, so that the model may change during the transfer. Copies one tensor at a time."""
    tensors = {}
    for name, tensor in (model if isinstance(model, Mapping) else named_tensors(model)).items():
        host = cast(tensor, dtype).cpu().contiguous()
        tensors[name] = tensor_bytes(host.clone() if host.data_ptr() == tensor.data_ptr() else host)
    return tensors


def first_not_finite(tensors: Mapping[str, TensorBytes]) -> str | None:
    """Return the name of the first tensor of a snapshot with a NaN or an infinity; None if there is none."""
    for name, tensor in tensors.items():
        flat = torch.frombuffer(tensor.data, dtype=getattr(torch, tensor.dtype))
        if not all_finite(flat):
            return name
    return None


def publish_version(store: WeightStore, model: Policy, version: int, lineage: str, *, dtype: DType) -> Path:
    """Write `model` as `version` of `lineage`; returns the manifest's path.

    The payload is complete when this returns, so the model may change at once. Names are Hugging Face's; of tied
    parameters only the first is included. Raises WeightError if there is not enough space.
    """
    tensors = {name: tensor_bytes(cast(tensor, dtype)) for name, tensor in named_tensors(model).items()}
    return store.publish(version, lineage, tensors)
