"""Digests of the tensors of safetensors files, and the first that differs between two folders. Imports no torch.

A digest covers dtype, shape and bytes. States of random generators are not compared: they are not tensors of the model.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from areal_like.errors import OperationError
from areal_like.weights.tensor_parts import SpreadTensor, has_parts, tensors_in

SUFFIX = ".safetensors"
GENERATOR = "generator/"
PIECE_BYTES = 16 << 20
_HEAD = struct.Struct("<Q")
_MAX_HEADER_BYTES = 256 << 20
_NUMPY = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}


class Place(NamedTuple):
    """Where a tensor is: its file, the first byte, dtype as the file names it, shape, and size in bytes. spread: if its
    items are in the parts of several ranks."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    spread: SpreadTensor | None = None


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in two folders. `words`: how it differs."""

    name: str
    words: str


def places_in(folder: Path) -> dict[str, Place]:
    """Return where each tensor of the folder's safetensors files is, by `file name: tensor name`; of a model that is
    split over several files by the tensor's name alone. Of a checkpoint in the parts of ranks the names are those of a
    checkpoint of one process. Raises OperationError for a damaged file."""
    if has_parts(folder):
        return {
            _name_in_one_process(key): Place(folder, 0, tensor.dtype, tensor.shape, tensor.num_bytes, tensor)
            for key, tensor in sorted(tensors_in(folder).items())
            if not key.startswith(GENERATOR)
        }
    files = sorted(folder.glob(f"*{SUFFIX}"))
    is_split = any("-of-" in file.name for file in files)
    found: dict[str, Place] = {}
    for file in files:
        for name, place in _places(file).items():
            if not name.startswith(GENERATOR):
                found[name if is_split or len(files) == 1 else f"{file.stem}: {name}"] = place
    return found


def _name_in_one_process(key: str) -> str:
    """The name that a tensor of a part has in a checkpoint of one process."""
    for prefix, file in (("weight/", "model"), ("critic/", "critic")):
        if key.startswith(prefix):
            return f"{file}: {key.removeprefix(prefix)}"
    return f"optimizer: {key}"


def digests_in(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor's dtype, shape and bytes, by the names of `places_in`."""
    return {name: _digest(place) for name, place in places_in(folder).items()}


def total(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for all tensors: of their names and digests, sorted by name."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def first_difference(recorded: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Return the first name, in the order of `recorded`, whose digests differ or that only one of both has."""
    for name in [*recorded, *(name for name in found if name not in recorded)]:
        if recorded.get(name) != found.get(name):
            return name
    return None


def compare_folders(recorded: Path, found: Path) -> tuple[TensorDifference | None, dict[str, str]]:
    """Compare all tensors of two folders; return the first that differs, and the digests of `found`."""
    theirs, ours = digests_in(recorded), digests_in(found)
    name = first_difference(theirs, ours)
    if name is None:
        return None, ours
    there, here = places_in(recorded).get(name), places_in(found).get(name)
    return TensorDifference(name, _words(there, here)), ours


def _words(recorded: Place | None, found: Place | None) -> str:
    if recorded is None or found is None:
        return "only one of the two has this tensor"
    if (recorded.dtype, recorded.shape) != (found.dtype, found.shape):
        return f"{recorded.dtype} {list(recorded.shape)} in the record, {found.dtype} {list(found.shape)} in the replay"
    theirs, ours = _values(recorded), _values(found)
    num_different = int(
        (theirs.view(np.uint8).reshape(len(theirs), -1) != ours.view(np.uint8).reshape(len(ours), -1)).any(1).sum()
    )
    words = f"{num_different:,} of {len(theirs):,} values differ"
    if recorded.dtype in _NUMPY and theirs.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            largest = np.abs(theirs.astype(np.float64) - ours.astype(np.float64)).max()
        words += f", by at most {largest:.3g}"
    return words


def _values(place: Place) -> np.ndarray:
    """The tensor, flat; of a dtype that NumPy lacks as integers of the same size."""
    count = max(1, int(np.prod(place.shape)))
    dtype = np.dtype(_NUMPY.get(place.dtype, f"<u{place.num_bytes // count}"))
    if place.spread is not None:
        return place.spread.bytes_of().view(dtype)
    with place.file.open("rb") as opened:
        opened.seek(place.offset)
        return np.frombuffer(opened.read(place.num_bytes), dtype)


def _digest(place: Place) -> str:
    digest = hashlib.sha256(f"{place.dtype} {list(place.shape)} ".encode())
    left = place.num_bytes
    if (spread := place.spread) is not None:
        step = max(1, PIECE_BYTES // spread.item_bytes)
        num_items = left // spread.item_bytes
        for first in range(0, num_items, step):
            digest.update(spread.bytes_of(first, min(step, num_items - first)).data)
        return digest.hexdigest()
    with place.file.open("rb") as opened:
        opened.seek(place.offset)
        while left:
            piece = opened.read(min(left, PIECE_BYTES))
            if not piece:
                raise OperationError(f"{place.file} is truncated")
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _places(file: Path) -> dict[str, Place]:
    try:
        with file.open("rb") as opened:
            (size,) = _HEAD.unpack(opened.read(_HEAD.size))
            if size > _MAX_HEADER_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(opened.read(size))
            start = _HEAD.size + size
            return {
                name: Place(
                    file, start + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]),
                    entry["data_offsets"][1] - entry["data_offsets"][0],
                )
                for name, entry in sorted(header.items())
                if name != "__metadata__"
            }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise OperationError(f"{file} is damaged ({error})") from error
