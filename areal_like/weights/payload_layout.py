"""Layout of tensors in a payload: dtypes, sizes, offsets, and the header of a safetensors file. Imports no torch.

Payloads are written and read in weight_store.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

StoreKind = Literal["shm", "disk"]
ALIGNMENT = 64
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
Chunk = tuple[str, memoryview]
"""A tensor's name, and some of its bytes."""


class TensorBytes(NamedTuple):
    """One tensor as raw little-endian bytes, C order; `dtype` as torch names it, without the `torch.`."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class TensorLayout(NamedTuple):
    """Dtype and shape of a tensor whose bytes are elsewhere."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return expected_bytes(self.dtype, self.shape)


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor is stored in the payload. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    crc32: int


def lay_out(
    kind: StoreKind,
    tensors: Mapping[str, TensorBytes | TensorLayout],
    metadata: Mapping[str, str] | None = None,
) -> tuple[list[TensorEntry], bytes]:
    """Entries with offsets (checksums still 0), and the header before the first tensor. `disk`: a safetensors file.

    metadata: added to the header's, for `disk`.

    safetensors allows no gaps, so wide dtypes come first: every tensor is then aligned to its own item size.
    """
    names = sorted(tensors, key=lambda name: (-ITEM_BYTES.get(tensors[name].dtype, 0), name))
    entries, offset = [], 0
    for name in names:
        tensor = tensors[name]
        dtype, shape = tensor[0], tensor[1]
        num_bytes = expected_bytes(dtype, shape)
        if isinstance(tensor, TensorBytes):
            _check_size(name, tensor, num_bytes)
        if kind == "shm":
            offset += -offset % ALIGNMENT
        entry = TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, num_bytes=num_bytes, crc32=0)
        entries.append(entry)
        offset += num_bytes
    header = _safetensors_header(entries, metadata or {}) if kind == "disk" else b""
    return [msgspec.structs.replace(entry, offset=entry.offset + len(header)) for entry in entries], header


def _check_size(name: str, tensor: TensorBytes, num_bytes: int) -> None:
    data = tensor.data
    if data.nbytes != num_bytes or not data.c_contiguous:
        got = f"{data.nbytes} {'' if data.c_contiguous else 'non-'}contiguous bytes"
        raise ValueError(
            f"tensor {name}: expected {num_bytes} contiguous bytes for {tensor.dtype}{tuple(tensor.shape)}, got {got}"
        )


def _safetensors_header(entries: list[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    for entry in entries:
        table[entry.name] = {
            "dtype": _SAFETENSORS[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.offset, entry.offset + entry.num_bytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def expected_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a tensor. Raises ValueError for an unknown dtype or a negative size."""
    if dtype not in ITEM_BYTES or any(size < 0 for size in shape):
        raise ValueError(f"the dtype {dtype} is unknown, or the shape {shape} contains a negative size")
    count = ITEM_BYTES[dtype]
    for size in shape:
        count *= size
    return count
