"""The trainer's names of tensors as those of checkpoints, which servers load.

transformers stores the experts of a layer in two tensors, checkpoints have two or three per expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


def as_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the names of a checkpoint: stacked experts are split into views."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stacked = _STACKED.search(name)
        if stacked is None:
            found[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if stacked[1] == "gate_up_proj" else ("down_proj",)
        for expert, both in enumerate(tensor):
            for part, piece in zip(names, both.chunk(len(names)), strict=True):
                found[f"{name[: stacked.start()]}.experts.{expert}.{part}.weight"] = piece
    return found
