"""Lossless differences between two versions: the manifest, the block codec, and the choice of files that lead to a
version.

Files and their retention are in trainer/weights/version_writer.py and rollout/weights/local_versions.py.

A delta has the layout of its base: the same names, dtypes, shapes and offsets. If these change, a full version is
published. Only the items of a tensor whose bits differ are stored: their positions, and the difference of their bit
patterns read as integers, zigzag-encoded so that one step up or down in the last place is a small number. Both are
split into byte planes and compressed with zstd, since the high bytes of small numbers are zeros. (PULSE, arXiv
2602.03839, measures that few bfloat16 weights change in a step at RL learning rates; benchmarks/delta.py measures it
here.)
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard

from areal_like.errors import WeightsDamaged
from areal_like.weights.payload_layout import ITEM_BYTES
from areal_like.weights.weight_store import WeightManifest

DELTA_SUFFIX = ".delta"
DELTA_MANIFEST_SUFFIX = ".delta.json"
BLOCK_ITEMS = 1 << 20
"""Number of items encoded at once; it bounds memory on both sides to tens of MB."""
BITMAP_ABOVE = 1 / 16
"""Share of changed items from which positions are stored as a bitmap instead of the gaps between them."""

_GAPS, _BITMAP, _ALL = 0, 1, 2
_HEAD = struct.Struct("<BBII")
"""Block header: encoding of positions, bytes per item, items of the block, changed items; followed by the length of
every plane."""
_LENGTH = struct.Struct("<I")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class DeltaTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of one tensor are stored in the delta file; `num_bytes` 0: it did not change."""

    name: str
    offset: int
    num_bytes: int


class DeltaManifest(msgspec.Struct, frozen=True, kw_only=True):
    """How to compute a version from its base. `result` describes the resulting payload, including checksums."""

    base_version: int
    base_digest: str
    payload: str
    num_bytes: int
    tensors: tuple[DeltaTensor, ...]
    result: WeightManifest

    def __post_init__(self) -> None:
        if self.payload != os.path.basename(self.payload) or not 0 <= self.base_version < self.result.version:
            raise ValueError(
                f"invalid delta {self.payload!r} from version {self.base_version} to {self.result.version}: the "
                "payload must be a file name, and the result must be a newer version"
            )
        if [part.name for part in self.tensors] != [entry.name for entry in self.result.tensors]:
            raise ValueError("a delta must list the tensors of its result in the same order")
        for part in self.tensors:
            if part.offset < 0 or part.num_bytes < 0 or part.offset + part.num_bytes > self.num_bytes:
                raise ValueError(f"the blocks of {part.name} are outside the delta's payload")


class Offer(NamedTuple):
    """One published file: a full version (`base_version` None) or the delta that leads to it."""

    num_bytes: int
    base_version: int | None = None
    base_digest: str = ""


class Base(NamedTuple):
    """A version that a process has, by number and content."""

    version: int
    digest: str


def digest(manifest: WeightManifest) -> str:
    """Digest of the content of a version, whatever its offsets: SHA-256 over names, dtypes, shapes and checksums."""
    rows = sorted((entry.name, entry.dtype, list(entry.shape), entry.crc32) for entry in manifest.tensors)
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def same_layout(first: WeightManifest, second: WeightManifest) -> bool:
    """True where a delta from one to the other can exist."""
    if first.kind != second.kind or first.num_bytes != second.num_bytes or len(first.tensors) != len(second.tensors):
        return False
    pairs = zip(first.tensors, second.tensors, strict=True)
    return all((a.name, a.dtype, a.shape, a.offset) == (b.name, b.dtype, b.shape, b.offset) for a, b in pairs)


def route(offers: Mapping[int, Offer], version: int, base: Base | None) -> list[int]:
    """Choose the files that lead to a version with the fewest bytes: from `base` by deltas, or from a full version.

    Args:
        offers: the published file of each version.
        version: the requested version.
        base: the version that the caller has; None for none.

    Returns:
        Versions whose files are applied, in order.

    Raises:
        WeightError: no files lead to the version.
    """
    ways: list[list[int]] = []
    way: list[int] = []
    at: int | None = version
    while at is not None and (offer := offers.get(at)) is not None:
        way = [at, *way]
        if offer.base_version is None or (base is not None and (offer.base_version, offer.base_digest) == base):
            ways.append(way)
        assert offer.base_version is None or offer.base_version < at, "a delta leads to a newer version"
        at = offer.base_version
    if not ways:
        raise WeightsDamaged(f"version {version} cannot be loaded: a full version before it no longer exists")
    return min(ways, key=lambda versions: sum(offers[v].num_bytes for v in versions))


def encode_tensor(base: memoryview, new: memoryview, dtype: str, level: int) -> Iterator[bytes]:
    """Encode the items in which two versions of a tensor differ.

    Args:
        base: bytes of the older version.
        new: bytes of the newer one, of equal length.
        dtype: as in the manifest.
        level: zstd level, 1 to 19.

    Returns:
        Compressed blocks; none where no bit differs.
    """
    unsigned = _UNSIGNED[ITEM_BYTES[dtype]]
    old_N, new_N = np.frombuffer(base, unsigned), np.frombuffer(new, unsigned)
    if len(old_N) != len(new_N):
        raise ValueError(f"the base tensor and the new tensor differ in size: {len(base)} and {len(new)} bytes")
    if np.array_equal(old_N, new_N):
        return
    compressor = zstandard.ZstdCompressor(level=level)
    for start in range(0, len(old_N), BLOCK_ITEMS):
        yield _encode_block(old_N[start : start + BLOCK_ITEMS], new_N[start : start + BLOCK_ITEMS], compressor)


def _encode_block(old_N: np.ndarray, new_N: np.ndarray, compressor: zstandard.ZstdCompressor) -> bytes:
    is_changed_N = old_N != new_N
    places_C = np.flatnonzero(is_changed_N)
    num_items, num_changed = len(old_N), len(places_C)
    if num_changed == num_items:
        how, places = _ALL, np.zeros((0, 0), np.uint8)
    elif num_changed > num_items * BITMAP_ABOVE:
        how, places = _BITMAP, np.packbits(is_changed_N)[None, :]
    else:
        how, places = _GAPS, _planes(np.diff(places_C, prepend=-1).astype(np.uint32) - 1)
    values = _planes(_fold(new_N[places_C] - old_N[places_C]))
    planes = (*places, *values) if num_changed else ()
    blobs = [compressor.compress(plane.tobytes()) for plane in planes]
    head = _HEAD.pack(how, old_N.itemsize, num_items, num_changed)
    return b"".join([head, *(_LENGTH.pack(len(blob)) for blob in blobs), *blobs])


def apply_tensor(blocks: memoryview, target: memoryview, dtype: str) -> None:
    """Turn a tensor into its newer version in place.

    Args:
        blocks: the blocks of `encode_tensor`, concatenated.
        target: the base's bytes, writable.
        dtype: as in the manifest.

    Raises:
        WeightError: the blocks are damaged.
    """
    item_bytes = ITEM_BYTES[dtype]
    target_N = np.frombuffer(target, _UNSIGNED[item_bytes])
    decompressor = zstandard.ZstdDecompressor()
    start = offset = 0
    try:
        while offset < len(blocks):
            how, width, num_items, num_changed = _HEAD.unpack_from(blocks, offset)
            if width != item_bytes or start + num_items > len(target_N) or num_changed > num_items or not num_items:
                raise WeightsDamaged("a delta block does not fit its tensor")
            offset += _HEAD.size
            sizes = _plane_sizes(how, width, num_items, num_changed)
            lengths = [_LENGTH.unpack_from(blocks, offset + index * _LENGTH.size)[0] for index in range(len(sizes))]
            offset += len(sizes) * _LENGTH.size
            planes = []
            for size, length in zip(sizes, lengths, strict=True):
                planes.append(_decompress(decompressor, blocks[offset : offset + length], size))
                offset += length
            if num_changed:
                part_N = target_N[start : start + num_items]
                places_C = _places(how, planes[:-width], num_items, num_changed)
                part_N[places_C] += _unfold(_join(planes[-width:]))
            start += num_items
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as error:
        raise WeightsDamaged(f"damaged delta: {error}") from error
    if start != len(target_N):
        raise WeightsDamaged(f"the delta has {start} items, but the tensor has {len(target_N)}")


def _plane_sizes(how: int, width: int, num_items: int, num_changed: int) -> list[int]:
    """Bytes of each plane: those of the positions, then those of the values; none if nothing changed."""
    if how not in (_GAPS, _BITMAP, _ALL) or (how == _ALL and num_changed != num_items):
        raise WeightsDamaged("a delta block has an unknown encoding")
    if not num_changed:
        return []
    places = {_GAPS: [num_changed] * 4, _BITMAP: [(num_items + 7) // 8], _ALL: []}[how]
    return [*places, *[num_changed] * width]


def _places(how: int, planes: list[np.ndarray], num_items: int, num_changed: int) -> np.ndarray | slice:
    if how == _ALL:
        return slice(None)
    if how == _BITMAP:
        places_C = np.flatnonzero(np.unpackbits(planes[0], count=num_items))
    else:
        places_C = np.cumsum(_join(planes).astype(np.int64) + 1) - 1
    if len(places_C) != num_changed or (num_changed and places_C[-1] >= num_items):
        raise WeightsDamaged("a delta block contains invalid positions")
    return places_C


def _decompress(decompressor: zstandard.ZstdDecompressor, blob: memoryview, size: int) -> np.ndarray:
    """Decompress one plane of `size` bytes. The size that a frame claims is checked before memory is allocated."""
    if zstandard.frame_content_size(blob) != size:
        raise WeightsDamaged("a byte plane of a delta block has the wrong size")
    return np.frombuffer(decompressor.decompress(blob), np.uint8)


def _planes(values_C: np.ndarray) -> np.ndarray:
    """Byte planes [item bytes, C], lowest byte first."""
    little = values_C.astype(values_C.dtype.newbyteorder("<"), copy=False)
    return np.ascontiguousarray(little.view(np.uint8).reshape(len(values_C), -1 if len(values_C) else 1).T)


def _join(planes: list[np.ndarray]) -> np.ndarray:
    width = len(planes)
    return np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1).view(_UNSIGNED[width])


def _fold(difference_C: np.ndarray) -> np.ndarray:
    """Zigzag-encode: map 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ... Differences are modulo 2 to the width, so nothing
    is lost."""
    bits = difference_C.itemsize * 8
    signed = difference_C.view(_SIGNED[difference_C.itemsize])
    return ((signed << 1) ^ (signed >> (bits - 1))).view(difference_C.dtype)


def _unfold(folded_C: np.ndarray) -> np.ndarray:
    one = folded_C.dtype.type(1)
    return (folded_C >> one) ^ (~(folded_C & one) + one)
