"""Conversion between checkpoints and Hugging Face folders. Imports no torch.

Shapes and names of tensors are not changed. Hugging Face folders get no optimizer state.

A checkpoint's weights are always float32. The original dtype is recorded in its state.json, and the export uses it:
bfloat16 and float16 are subsets of float32, so both conversions keep every bit. One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_like.encryption.files import open_to_write
from areal_like.encryption.run_key import encrypt_as
from areal_like.errors import UserError, WeightError
from areal_like.plain_folder import plain_folder
from areal_like.weights.tensor_parts import SpreadTensor, has_parts, tensors_in
from trainer.checkpoints import checkpoint
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.checkpoint import CheckpointState
from trainer.checkpoints.companion_files import copy_companions
from trainer.checkpoints.provenance import write_provenance

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT, CRITIC_PREFIX = "weight/", "critic/"
"""Beginnings of the keys of weights and of the critic, where a file has both (trainer/host_copy.py)."""
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Converted dtypes, by their names in safetensors; all others are copied unchanged."""
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = {code: name for name, code in NAMES.items()}
MAX_HEADER_BYTES = 100 << 20


class Stored(NamedTuple):
    """A tensor in a safetensors file; `start` is the offset from the beginning of the file. spread: if its items are in
    the parts of several ranks; `file` is then their folder."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    spread: SpreadTensor | None = None


def export_checkpoint(folder: Path, out: Path, *, dtype: str | None = None, is_decrypted: bool = False) -> str:
    """Export a checkpoint, verified first, as a Hugging Face folder; returns the weights' dtype.

    dtype: float32, bfloat16 or float16; None: that of the original model. is_decrypted: write the model of an encrypted
    run in the clear. Raises UserError, WeightError, OperationError (disk).
    """
    refuse_filled(out)
    checkpoint.verify(folder)
    dtype = dtype or checkpoint.read_state(folder).origin_dtype
    config = model_config(folder)
    with plain_folder(folder) as plain, atomic_folder(out) as partial:
        if not is_decrypted:
            encrypt_as(folder, partial)
        write_weights(partial / WEIGHTS, stored_tensors(plain), NAMES[dtype])
        write_config(partial, config, dtype)
        copy_companions(folder, partial)
        write_provenance(partial, folder)
    return dtype


def import_folder(source: Path, out: Path) -> tuple[int, str]:
    """Import a Hugging Face folder as a checkpoint of version 0; returns the number of tensors and their dtype.

    Raises UserError, OperationError (disk).
    """
    refuse_filled(out)
    config, tensors = model_config(source), stored_tensors(source)
    dtype = _type_of(tensors, source)
    state = CheckpointState(version=0, lineage="", run_id="", config_digest="", origin_dtype=dtype)

    def write(partial: Path) -> Mapping[str, tuple[int, str]]:
        facts = {WEIGHTS: write_weights(partial / WEIGHTS, tensors, "F32")}
        write_config(partial, config, "float32")
        copy_companions(source, partial)
        return facts

    with atomic_folder(out) as partial:
        checkpoint.fill(partial, state, write)
    return len(tensors), dtype


# ---------------------------------------------------------------- safetensors


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder's weights by name. Raises UserError if there are none, or a file is damaged;
    WeightError if a checkpoint lacks a part."""
    if has_parts(folder):
        return _in_parts(folder, lambda key: key.removeprefix(WEIGHT) if key.startswith(WEIGHT) else None)
    files = sorted(folder.glob("*.safetensors"))
    files = [file for file in files if file.name not in (OPTIMIZER, checkpoint.CRITIC)]
    if (folder / INDEX).is_file():
        try:
            named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                "the index is damaged", where=str(folder / INDEX), remedy="download the model again"
            ) from error
        files = [folder / name for name in sorted(named)]
    if not files:
        others = sorted(file.name for file in folder.glob("*.bin"))
        what = (
            f"the weights of the model are in {others[0]}, but only safetensors files can be read"
            if others
            else "the folder contains no weights"
        )
        raise UserError(what, where=str(folder), remedy="specify a folder that contains model.safetensors")
    found: dict[str, Stored] = {}
    for file in files:
        for name, tensor in stored_in(file):
            if name in found:
                raise UserError(
                    f"the tensor {name} is in two files", where=str(folder), remedy="keep only one of the two files"
                )
            found[name] = tensor
    return found


def stored_optimizer(folder: Path) -> dict[str, Stored]:
    """Return AdamW's state and the generators of a checkpoint by key. Raises UserError, WeightError."""
    if has_parts(folder):
        return _in_parts(folder, lambda key: None if key.startswith((WEIGHT, CRITIC_PREFIX)) else key)
    return dict(stored_in(folder / OPTIMIZER))


def stored_critic(folder: Path) -> dict[str, Stored]:
    """Return the critic's weights and AdamW's state in a checkpoint by key; empty if it has no critic.

    Raises UserError, WeightError.
    """
    if has_parts(folder):
        return _in_parts(folder, lambda key: key.removeprefix(CRITIC_PREFIX) if key.startswith(CRITIC_PREFIX) else None)
    file = folder / checkpoint.CRITIC
    return dict(stored_in(file)) if file.is_file() else {}


def _in_parts(folder: Path, rename: Callable[[str], str | None]) -> dict[str, Stored]:
    return {
        name: Stored(folder, tensor.dtype, tensor.shape, 0, tensor.num_bytes, tensor)
        for key, tensor in tensors_in(folder).items()
        if (name := rename(key)) is not None
    }


def stored_in(file: Path) -> Iterator[tuple[str, Stored]]:
    """Yield every tensor of a safetensors file with its name. Raises UserError if the file is damaged."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if not 0 < size <= MAX_HEADER_BYTES:
                raise ValueError("no header")
            header = opened.read(size)
            if len(header) < size:
                raise ValueError("the file ends inside its header")
            table, num_bytes = json.loads(header), opened.seek(0, 2)
        table.pop("__metadata__", None)
        for name, entry in table.items():
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= num_bytes - 8 - size:
                raise ValueError(f"the tensor {name} extends beyond the end of the file")
            width = FLOATS.get(entry["dtype"])
            if width is not None and last - first != width * math.prod(entry["shape"]):
                raise ValueError(f"the size of the tensor {name} does not match its shape")
            yield name, Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + size + first, last - first)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"the file is not a complete safetensors file ({error})", where=str(file), remedy="download the file again"
        ) from error


def reason_of(error: Exception) -> str:
    """Return what is wrong with a file, without its path and a remedy for models that were downloaded."""
    return error.what if isinstance(error, UserError) else str(error)


def write_weights(
    file: Path, tensors: Mapping[str, Stored], dtype: str, added: Mapping[str, Callable[[], np.ndarray]] | None = None
) -> tuple[int, str]:
    """Write all tensors to one file, floats as `dtype`; returns its size and sha256. added: functions by name, which
    return float32 numbers [N] to add to the N items of a tensor.
    """
    names = sorted(tensors, key=lambda name: (-_size(tensors[name], dtype)[1], name))  # wide first: aligned
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        num_bytes, _ = _size(tensors[name], dtype)
        code = dtype if tensors[name].dtype in FLOATS else tensors[name].dtype
        table[name] = {
            "dtype": code, "shape": list(tensors[name].shape), "data_offsets": [offset, offset + num_bytes],
        }  # fmt: skip
        offset += num_bytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % 64)
    with open_to_write(file) as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            opened.write(_converted(tensors[name], dtype, (added or {}).get(name)))
    return opened.num_bytes, opened.sha256


def _size(tensor: Stored, dtype: str) -> tuple[int, int]:
    """Return the bytes of the tensor when written as `dtype`, and of one of its items."""
    if tensor.dtype not in FLOATS:
        return tensor.num_bytes, max(1, tensor.num_bytes // max(1, math.prod(tensor.shape)))
    return math.prod(tensor.shape) * FLOATS[dtype], FLOATS[dtype]


def read_stored(tensor: Stored) -> bytes:
    """Read the bytes of a tensor. Raises WeightError if the file is shorter than its header says."""
    if tensor.spread is not None:
        return tensor.spread.bytes_of().tobytes()
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        data = file.read(tensor.num_bytes)
    if len(data) != tensor.num_bytes:
        raise WeightError(f"{tensor.file} is truncated")
    return data


def _converted(tensor: Stored, dtype: str, added: Callable[[], np.ndarray] | None) -> bytes | memoryview:
    data = read_stored(tensor)
    if added is not None:
        return narrowed(widened(data, tensor.dtype) + added(), dtype)
    if tensor.dtype == dtype or tensor.dtype not in FLOATS:
        return data
    return narrowed(widened(data, tensor.dtype), dtype)


def widened(data: bytes, dtype: str) -> np.ndarray:
    """Convert the items to float32, exactly. dtype: F32, F16 or BF16."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def narrowed(items_N: np.ndarray, dtype: str) -> bytes:
    """Convert float32 items to `dtype`, to nearest, ties to even; NaNs stay NaNs."""
    if dtype == "F32":
        return items_N.astype("<f4").tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return items_N.astype("<f2").tobytes()
    bits_N = items_N.view(np.uint32)
    rounded_N = (bits_N + (((bits_N >> 16) & 1) + 0x7FFF)) >> 16
    quiet_N = (bits_N >> 16) | 0x0040
    # Exactly representable values are unchanged; a NaN keeps its bits too.
    kept_N = np.where(np.isnan(items_N), quiet_N, rounded_N)
    return np.where(bits_N & 0xFFFF, kept_N, bits_N >> 16).astype("<u2").tobytes()


# ---------------------------------------------------------------- the rest of the folder


def _type_of(tensors: Mapping[str, Stored], source: Path) -> str:
    """Return the float dtype of a model. Raises UserError if there are several, which no export could restore."""
    found = sorted({tensor.dtype for tensor in tensors.values() if tensor.dtype in FLOATS})
    strange = sorted({tensor.dtype for tensor in tensors.values() if tensor.dtype[:1] in "FB"} - {*FLOATS, "BOOL"})
    if strange or len(found) != 1:
        listed = ", ".join([*found, *strange]) or "none"
        raise UserError(
            f"the weights have several dtypes, or one that is not supported: {listed}",
            where=str(source),
            remedy="use a model whose weights are all float32, all bfloat16 or all float16",
        )
    return DTYPES[found[0]]


def model_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises UserError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
        assert isinstance(config, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(
            "the file is missing or not a JSON object", where=str(file), remedy="specify the folder of a model"
        ) from error
    return config


def write_config(folder: Path, config: Mapping[str, Any], dtype: str) -> None:
    """Write the config unchanged except for the dtype."""
    fresh = {key: value for key, value in config.items() if key != "torch_dtype"}
    (folder / "config.json").write_text(json.dumps(fresh | {"dtype": dtype}, indent=2) + "\n")


def refuse_filled(out: Path) -> None:
    """Raise UserError if the path exists and is not an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(
            "the path exists and is not an empty folder", where=str(out), remedy="choose a new or empty folder"
        )
