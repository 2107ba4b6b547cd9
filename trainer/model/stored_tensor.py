"""Tensors of safetensors files, or of a checkpoint's parts, as torch tensors in memory of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from areal_like.errors import WeightError
from trainer.checkpoints.convert import Stored, read_stored

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""By their names in safetensors."""


def as_tensor(stored: Stored) -> torch.Tensor:
    """Read a tensor. Raises WeightError if a file is truncated, or the dtype is not known."""
    dtype = TORCH_DTYPES.get(stored.dtype)
    if dtype is None:
        raise WeightError(f"{stored.file} has a tensor of the dtype {stored.dtype}, which is not supported")
    tensor = torch.empty(stored.shape, dtype=dtype)
    if tensor.numel():
        flat_U = tensor.view(-1).view(torch.uint8).numpy()
        if stored.spread is None:
            flat_U[:] = np.frombuffer(read_stored(stored), np.uint8)
        else:
            stored.spread.read(0, math.prod(stored.shape), flat_U)
    return tensor
