"""What a version of an adapter (LoRA) says about itself: which base it belongs to, and its own content. Torch-free.

Owns: `AdapterNote` and `LoneAdapter`, parts of a version's manifest; the names peft gives to the tensors of an adapter.
Refuses: merging (trainer/model/lora.py, rollout/weights/merging.py).
"""

from __future__ import annotations

import msgspec

PEFT_PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B")


class LoneAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """The payload holds A [rank, in] and B [out, rank] alone, by their names in peft.

    A worker makes base + scale B A of it, in `dtype`. base: CRC-32 of every tensor of the base in that type, by name.
    """

    scale: float
    dtype: str
    base: dict[str, int]


class AdapterNote(msgspec.Struct, frozen=True, kw_only=True):
    """Digests (areal_like.weights.delta.digest) of the base, in the type versions have, and of the adapter, float32.

    lone: None where the payload holds whole merged weights.
    """

    base_digest: str
    adapter_digest: str
    lone: LoneAdapter | None = None


def peft_name(name: str) -> str:
    """The name in peft's files of a tensor that this program calls `<module>.lora_A` or `<module>.lora_B`.

    Example:
        >>> peft_name("model.layers.0.mlp.up_proj.lora_A")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{name}.weight"


def part_names(weight: str) -> list[str]:
    """The names in peft's files of A and B of the linear module whose weight this is.

    Example:
        >>> part_names("model.lm.weight")
        ['base_model.model.model.lm.lora_A.weight', 'base_model.model.model.lm.lora_B.weight']
    """
    return [peft_name(f"{weight.removesuffix('.weight')}.{part}") for part in PARTS]


def own_name(name: str) -> str:
    """Undo of `peft_name`. Raises ValueError for a name that it does not give."""
    inner = name.removeprefix(PEFT_PREFIX).removesuffix(".weight")
    if peft_name(inner) != name or inner.rpartition(".")[2] not in PARTS:
        raise ValueError(f"{name} is no tensor of a LoRA adapter")
    return inner
