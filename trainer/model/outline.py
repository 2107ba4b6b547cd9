"""A model without its parameters, and its parameters as ranges of items in safetensors files.

For backends in which a rank keeps a part of each parameter: the model is made on the meta device and distributed, and
then each rank reads its part only. Full models are loaded in model.py.

Not every folder can be read in parts: pickled weights, files with other names or shapes than the model's (transformers
converts them when it loads), and files that hold a tied parameter twice. `sliced_source` returns None for these, and
the caller loads the full model, which also reports what is missing or has another shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_like.errors import UserError
from areal_like.weights.tensor_parts import SpreadTensor, fill, has_parts
from trainer.checkpoints.convert import INDEX, Stored, stored_tensors
from trainer.export import first_named
from trainer.host_copy import Items
from trainer.model.model import check_folder, without_dropout

TORCH_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of parameters that are read in parts, by their names in safetensors."""


ROWS_BYTES = 1 << 20
"""Most bytes of AdamW's state in memory at once where only columns of it are wanted."""


class SlicedSource:
    """Reads parameters from safetensors files, any range of items of them, as float32."""

    def __init__(self, stored: Mapping[str, Stored], piece_bytes: int, zeros: Collection[str] = ()) -> None:
        """piece_bytes: most bytes of a file in memory at once, besides what is read in place: float32 on the host.
        zeros: names of parameters that are zero at first."""
        self._stored, self._piece_bytes, self._zeros = stored, max(1024, piece_bytes), frozenset(zeros)

    def read(self, name: str, first: int, out: torch.Tensor, width: int = 0) -> None:
        """Read the items from `first` on into `out`: float32, contiguous, any shape and device. width: see Items.

        Raises WeightError if the file is shorter than its header says.
        """
        flat_N = out.view(-1)
        if name in self._zeros:
            flat_N.zero_()
            return
        tensor = self._stored[name]
        if tensor.spread is not None:
            self._read_spread(tensor, tensor.spread, first, flat_N, width)
            return
        if width:
            self._read_columns(tensor, first, flat_N.view(-1, width))
            return
        dtype = TORCH_FLOATS[tensor.dtype]
        width = dtype.itemsize
        is_direct = dtype == torch.float32 and out.device.type == "cpu"
        num_items = max(1, len(flat_N) if is_direct else self._piece_bytes // width)
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start + first * width)
            for start in range(0, len(flat_N), num_items):
                part_N = flat_N[start : start + num_items]
                read_N = part_N if is_direct else torch.empty(len(part_N), dtype=dtype)
                fill(file, memoryview(read_N.view(torch.uint8).numpy().data), tensor.file)
                if not is_direct:
                    part_N.copy_(read_N)

    def _read_spread(self, tensor: Stored, spread: SpreadTensor, first: int, out_N: torch.Tensor, width: int) -> None:
        """Read from the parts of several ranks: in place if possible, else in pieces of whole rows of the columns."""
        dtype = TORCH_FLOATS[tensor.dtype]
        if dtype == torch.float32 and out_N.device.type == "cpu":
            spread.read(first, len(out_N), out_N.view(torch.uint8).numpy(), width)
            return
        row_items, step = math.prod(tensor.shape[1:]), max(1, self._piece_bytes // dtype.itemsize)
        step = max(width, step - step % width) if width else step
        for start in range(0, len(out_N), step):
            part_N = out_N[start : start + step]
            read_N = torch.empty(len(part_N), dtype=dtype)
            place = first + (start // width * row_items if width else start)
            spread.read(place, len(part_N), read_N.view(torch.uint8).numpy(), width)
            part_N.copy_(read_N)

    def _read_columns(self, tensor: Stored, first: int, out_RW: torch.Tensor) -> None:
        """Read rows in full, as many at a time as fit a piece, and keep their columns."""
        dtype, row_items = TORCH_FLOATS[tensor.dtype], math.prod(tensor.shape[1:])
        (num_rows, width), (row, column) = out_RW.shape, divmod(first, row_items)
        step = max(1, self._piece_bytes // (row_items * dtype.itemsize))
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start + row * row_items * dtype.itemsize)
            for start in range(0, num_rows, step):
                rows = torch.empty(min(step, num_rows - start), row_items, dtype=dtype)
                fill(file, memoryview(rows.view(-1).view(torch.uint8).numpy().data), tensor.file)
                out_RW[start : start + len(rows)].copy_(rows[:, column : column + width])


def outline(folder: Path) -> PreTrainedModel:
    """Return the model of `folder` with parameters and persistent buffers on the meta device, without dropout; other
    buffers have their values, on the host. Raises UserError for a folder without a readable causal language model."""
    config = check_folder(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _compute_buffers(model)
    return without_dropout(model)


def sliced_source(folder: Path, model: PreTrainedModel, piece_bytes: int) -> SlicedSource | None:
    """Return the source of all tensors of an `outline`; None if the folder cannot be read in parts.

    piece_bytes: most bytes of a file in memory at once.
    """
    if is_converted(model) or not _has_safetensors(folder):
        return None
    try:
        stored = stored_tensors(folder)
    except UserError:  # reported by transformers' own loading
        return None
    wanted = first_named(model)
    tied = model.state_dict().keys() - wanted.keys()
    if tied & stored.keys():
        return None
    for name, tensor in wanted.items():
        found = stored.get(name)
        if found is None or found.dtype not in TORCH_FLOATS or found.shape != tuple(tensor.shape):
            return None
        if tensor.dtype != torch.float32:
            return None
    return SlicedSource(stored, piece_bytes)


class ReadMoments(Protocol):
    """Reads AdamW's state of one parameter, when it is needed."""

    def __call__(self, name: str, items: Items | None = None, /) -> dict[str, torch.Tensor]:
        """Return the moments of the parameter `name` in its full shape, and `step`, a scalar; float32; empty if there
        is none. items: return only these, flat."""


def moment_reader(stored: Mapping[str, Stored], kinds: Mapping[str, Collection[str]]) -> ReadMoments:
    """Return the reader of AdamW's state in a checkpoint. stored: its tensors by `<moment>/<name of the parameter>`.
    kinds: what it has of each parameter, by its name."""
    source = SlicedSource(stored, ROWS_BYTES)  # consecutive float32 on the host is read in place, in one piece

    def read(name: str, items: Items | None = None, /) -> dict[str, torch.Tensor]:
        found = {}
        for kind in kinds.get(name, ()):
            shape = stored[f"{kind}/{name}"].shape
            wanted = Items(0, math.prod(shape)) if items is None or kind == "step" else items
            found[kind] = torch.empty(wanted.num, dtype=torch.float32)
            source.read(f"{kind}/{name}", wanted.first, found[kind], wanted.width)
            if wanted.num == math.prod(shape):
                found[kind] = found[kind].view(shape)
        return found

    return read


def is_converted(model: PreTrainedModel) -> bool:
    """True if tensors have other names or shapes on disk than in memory (transformers' weight conversions)."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    holder: Any = model
    known = getattr(holder, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(model, add_legacy=False) if known is None else known)


def _has_safetensors(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / "model.safetensors").is_file() or has_parts(folder)


def _compute_buffers(model: Any) -> None:
    """Compute the buffers that are not in files (rotary frequencies), as transformers does after it has loaded one."""
    for parameter in model.state_dict(keep_vars=True).values():
        parameter._is_hf_initialized = True  # left alone
    for name, buffer in list(model.named_non_persistent_buffers()):
        module_name, _, key = name.rpartition(".")
        model.get_submodule(module_name)._buffers[key] = torch.empty_like(buffer, device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
