"""Metadata of an adapter (LoRA) in a version's manifest: the base that it belongs to, and digests. Does not import
torch.

Merging is in trainer/model/lora.py and rollout/weights/merging.py.
"""

from __future__ import annotations

import msgspec

PEFT_PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B")


class AdapterPayload(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a payload that contains only A [rank, in] and B [out, rank], by their names in peft.

    A worker computes base + scale B A, in `dtype`. base: CRC-32 of every tensor of the base in that type, by name.
    """

    scale: float
    dtype: str
    base: dict[str, int]


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Digests (areal_like.weights.delta.digest) of the base, in the dtype of versions, and of the adapter in float32.

    lone: None if the payload contains all merged weights.
    """

    base_digest: str
    adapter_digest: str
    lone: AdapterPayload | None = None


def peft_name(name: str) -> str:
    """Convert our name of a tensor, `<module>.lora_A` or `<module>.lora_B`, to its name in peft's files.

    Example:
        >>> peft_name("model.layers.0.mlp.up_proj.lora_A")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{name}.weight"


def part_names(weight: str) -> list[str]:
    """Names in peft's files of A and B of the linear module with this weight.

    Example:
        >>> part_names("model.lm.weight")
        ['base_model.model.model.lm.lora_A.weight', 'base_model.model.model.lm.lora_B.weight']
    """
    return [peft_name(f"{weight.removesuffix('.weight')}.{part}") for part in PARTS]


def own_name(name: str) -> str:
    """Inverse of `peft_name`. Raises ValueError for other names."""
    inner = name.removeprefix(PEFT_PREFIX).removesuffix(".weight")
    if peft_name(inner) != name or inner.rpartition(".")[2] not in PARTS:
        raise ValueError(f"{name} is not the name of a LoRA adapter tensor")
    return inner
