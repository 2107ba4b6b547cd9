"""Converts a published payload to the tensors that a decoder computes with.

It reads and verifies payloads, and holds the fused weights of the lean decoder.

Weights are stored in the layout that is fastest for small batches: [in, out], with q, k, v side by side, and gate and
up side by side. Columns of q and k are grouped by key head (its G query heads, then the key head itself), so that one
view serves norm and rotation of both, and the queries of a key head are adjacent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from areal_like.errors import WeightError
from areal_like.weights.weight_store import WeightManifest, open_payload, verify
from rollout.engine.shape import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

warnings.filterwarnings(
    "ignore", message="The given buffer is not writable"
)  # payloads are mapped read-only intentionally


def open_verified(manifest_path: Path) -> tuple[WeightManifest, dict[str, Tensor]]:
    """Map a payload, check every checksum, and view it as tensors with Hugging Face names. Raises WeightError."""
    manifest, payload = open_payload(manifest_path)
    verify(manifest, payload)
    return manifest, tensors_of(manifest, payload)


def tensors_of(manifest: WeightManifest, payload: Mapping[str, memoryview]) -> dict[str, Tensor]:
    """View the raw bytes of a payload as tensors, without copying."""
    tensors = {}
    for entry in manifest.tensors:
        if entry.dtype not in DTYPES:
            raise WeightError(f"version {manifest.version}: {entry.name} has unknown dtype {entry.dtype}")
        flat = torch.frombuffer(payload[entry.name], dtype=DTYPES[entry.dtype])
        tensors[entry.name] = flat.view(tuple(entry.shape))
    return tensors


@dataclass(frozen=True)
class Place:
    """Target of a published tensor: `view` is its shape before it is copied into `target`, which is then scaled."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    target: Tensor
    scale: float = 1.0


def fill(places: Mapping[str, Place], tensors: Mapping[str, Tensor], optional: frozenset[str], version: int) -> None:
    """Copy every published tensor to its target.

    Raises WeightError if one is missing, unknown, of another shape or not finite. `optional`: names that a payload may
    contain although they are not needed (a tied head).
    """
    missing = [name for name in places if name not in tensors]
    if missing:
        raise WeightError(f"version {version} lacks {len(missing)} tensors of this model; the first is {missing[0]}")
    unknown = [name for name in tensors if name not in places and name not in optional]
    if unknown:
        raise WeightError(
            f"version {version} has {len(unknown)} tensors that this model does not have; the first is {unknown[0]}"
        )
    for name, place in places.items():
        source = tensors[name]
        if tuple(source.shape) != place.shape:
            raise WeightError(f"version {version}: {name} has shape {tuple(source.shape)}, expected {place.shape}")
        if not bool(torch.isfinite(source.sum(dtype=torch.float32))) and not bool(torch.isfinite(source).all()):
            raise WeightError(f"version {version}: {name} contains a value that is not finite")
        place.target.copy_(source.view(place.view))
        if place.scale != 1.0:
            place.target.mul_(place.scale)


def split_qkv(fused: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """Views of the outputs of q, k and v in a fused tensor [outputs of all three, ...], by the first letter."""
    num_keys, group, size = shape.num_key_heads, shape.num_queries_per_key, shape.head_size
    num_rotated = num_keys * (group + 1) * size
    rotated = fused[:num_rotated].view(num_keys, group + 1, size, *fused.shape[1:])
    return {"q": rotated[:, :group], "k": rotated[:, group], "v": fused[num_rotated:]}


class LayerWeights:
    """Fused weights of one layer; biases are None if the family has none."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*dims: int) -> Tensor:
            return torch.empty(*dims, dtype=dtype, device=device)

        hidden, inner = shape.hidden_size, shape.intermediate_size
        width = (shape.num_heads + 2 * shape.num_key_heads) * shape.head_size
        self.attention_norm = empty(hidden)
        self.qkv = empty(hidden, width)
        self.qkv_bias = empty(width) if shape.has_qkv_bias else None
        num_rotated = shape.num_heads + shape.num_key_heads
        self.qk_norm = empty(num_rotated, shape.head_size) if shape.has_qk_norm else None
        self.out = empty(shape.num_heads * shape.head_size, hidden)
        self.out_bias = empty(hidden) if shape.has_out_bias else None
        self.mlp_norm = empty(hidden)
        self.gate_up = empty(hidden, 2 * inner)
        self.gate_up_bias = empty(2 * inner) if shape.has_mlp_bias else None
        self.down = empty(inner, hidden)
        self.down_bias = empty(hidden) if shape.has_mlp_bias else None

    def places(self, prefix: str, shape: ModelShape, norm_scale: bool) -> Iterator[tuple[str, Place]]:
        """Hugging Face name and target of each tensor of this layer."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        num_keys, group, size = shape.num_key_heads, shape.num_queries_per_key, shape.head_size
        parts: tuple[tuple[Tensor | None, str, tuple[int, ...]], ...]
        parts = ((self.qkv.t(), "weight", (hidden,)), (self.qkv_bias, "bias", ()))
        for fused, kind, rest in parts:
            if fused is None:
                continue
            for letter, part in split_qkv(fused, shape).items():
                rows = (shape.num_heads if letter == "q" else num_keys) * size
                yield f"{prefix}self_attn.{letter}_proj.{kind}", Place((rows, *rest), tuple(part.shape), part)
        if self.qk_norm is not None:
            heads = self.qk_norm.view(num_keys, group + 1, size)
            scale = size**0.5 if norm_scale else 1.0
            yield f"{prefix}self_attn.q_norm.weight", Place((size,), (size,), heads[:, :group], scale)
            yield f"{prefix}self_attn.k_norm.weight", Place((size,), (size,), heads[:, group], scale)
        scale = hidden**0.5 if norm_scale else 1.0
        yield f"{prefix}input_layernorm.weight", Place((hidden,), (hidden,), self.attention_norm, scale)
        yield f"{prefix}post_attention_layernorm.weight", Place((hidden,), (hidden,), self.mlp_norm, scale)
        plain: dict[str, Tensor | None] = {
            "self_attn.o_proj.weight": self.out.t(),
            "self_attn.o_proj.bias": self.out_bias,
            "mlp.gate_proj.weight": self.gate_up.t()[:inner],
            "mlp.up_proj.weight": self.gate_up.t()[inner:],
            "mlp.gate_proj.bias": None if self.gate_up_bias is None else self.gate_up_bias[:inner],
            "mlp.up_proj.bias": None if self.gate_up_bias is None else self.gate_up_bias[inner:],
            "mlp.down_proj.weight": self.down.t(),
            "mlp.down_proj.bias": self.down_bias,
        }
        for name, target in plain.items():
            if target is not None:
                yield prefix + name, Place(tuple(target.shape), tuple(target.shape), target)


class FusedWeights:
    """One complete set of weights of the lean decoder; an engine holds two and swaps them.

    norm_scale: norm weights are stored times sqrt(width), for the decoder's form of the norm.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device, *, norm_scale: bool) -> None:
        self.embedding = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=device)
        self.layers = [LayerWeights(shape, dtype, device) for _ in range(shape.num_layers)]
        self.norm = torch.empty(shape.hidden_size, dtype=dtype, device=device)
        tied = shape.is_head_tied
        self.head = (
            self.embedding.t() if tied else torch.empty_like(self.embedding.t(), memory_format=torch.contiguous_format)
        )
        self.places: dict[str, Place] = {}
        hidden = (shape.hidden_size,)
        whole = (shape.vocab_size, shape.hidden_size)
        self.places["model.embed_tokens.weight"] = Place(whole, whole, self.embedding)
        for index, layer in enumerate(self.layers):
            self.places.update(layer.places(f"model.layers.{index}.", shape, norm_scale))
        self.places["model.norm.weight"] = Place(hidden, hidden, self.norm, hidden[0] ** 0.5 if norm_scale else 1.0)
        if not tied:
            self.places["lm_head.weight"] = Place(whole, whole, self.head.t())
        self._optional = frozenset({"lm_head.weight"} if tied else ())

    @property
    def num_bytes(self) -> int:
        """Bytes of all fused tensors; views of another tensor count once."""
        storages = {place.target.untyped_storage() for place in self.places.values()}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy a version's tensors. Raises WeightError if they do not fit; this set is then unusable."""
        fill(self.places, tensors, self._optional, version)
