"""Exports of a checkpoint with an adapter (LoRA): merged into its base, or the adapter alone. Imports no torch.

It checks that the base is the one the adapter was trained on. Checkpoints of full models and the conversion of dtypes
are in convert.py.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from areal_like.encryption.run_key import encrypt_as
from areal_like.errors import UserError, WeightError
from areal_like.plain_folder import plain_folder
from areal_like.weights.adapter import PARTS, PEFT_PREFIX, part_names
from trainer.checkpoints import checkpoint
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.checkpoint import ADAPTER, ADAPTER_BASE, ADAPTER_CONFIG
from trainer.checkpoints.companion_files import copy_companions
from trainer.checkpoints.convert import (
    NAMES,
    WEIGHTS,
    Stored,
    model_config,
    narrowed,
    read_stored,
    refuse_filled,
    stored_tensors,
    widened,
    write_config,
    write_weights,
)
from trainer.checkpoints.provenance import write_provenance

Form = Literal["merged", "adapter"]


def holds_adapter(folder: Path) -> bool:
    """True for a checkpoint of a run with an adapter."""
    return (folder / ADAPTER).is_file()


def export_adapter(folder: Path, out: Path, *, form: Form, dtype: str | None = None, is_decrypted: bool = False) -> str:
    """Export a checkpoint's policy, verified first; returns the weights' dtype, float32 unless another is given.

    form: `merged`: a Hugging Face model, base + scale B A; `adapter`: a folder for peft, SGLang and vLLM.
    is_decrypted: write the model of an encrypted run in the clear.

    Raises UserError, WeightError, OperationError (disk).
    """
    refuse_filled(out)
    checkpoint.verify(folder)
    dtype = dtype or checkpoint.read_state(folder).origin_dtype
    with plain_folder(folder) as plain, atomic_folder(out) as fresh:
        adapter = stored_tensors(plain)
        if not is_decrypted:
            encrypt_as(folder, fresh)
        if form == "adapter":
            write_weights(fresh / ADAPTER, adapter, NAMES[dtype])
            shutil.copyfile(folder / ADAPTER_CONFIG, fresh / ADAPTER_CONFIG)
        else:
            config = _json(folder / ADAPTER_CONFIG)
            path = Path(str(config["base_model_name_or_path"]))
            base, scale = _base(path, folder), float(config["lora_alpha"]) / int(config["r"])
            weights = base | _trained_in_full(adapter)
            write_weights(fresh / WEIGHTS, weights, NAMES[dtype], _products(base, adapter, scale))
            has_own_config = (folder / "config.json").is_file()  # of a reward model, whose class is not the base's
            write_config(fresh, model_config(folder if has_own_config else path), dtype)
        copy_companions(folder, fresh)
        write_provenance(fresh, folder)
    return dtype


def _products(
    base: Mapping[str, Stored], adapter: Mapping[str, Stored], scale: float
) -> dict[str, Callable[[], np.ndarray]]:
    """Return what is added to each target's items, computed when it is called."""

    def product(name: str) -> np.ndarray:
        lora_A_RI, lora_B_OR = (_array(adapter[one]) for one in part_names(name))
        return np.ravel((lora_B_OR @ lora_A_RI) * np.float32(scale))

    return {name: partial(product, name) for name in base if not adapter.keys().isdisjoint(part_names(name))}


def _trained_in_full(adapter: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors that replace the base's or are added to them: the head of a reward model."""
    ends = tuple(f".{part}.weight" for part in PARTS)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in adapter.items() if not name.endswith(ends)}


def _array(tensor: Stored) -> np.ndarray:
    return widened(read_stored(tensor), tensor.dtype).reshape(tensor.shape)


def _base(path: Path, folder: Path) -> dict[str, Stored]:
    """Return the base's tensors. Raises UserError if they are missing, or not those the adapter was trained on."""
    remedy = "restore the model in this folder, or use --lora adapter"
    if not path.is_dir():
        raise UserError("the base model of the adapter no longer exists", where=str(path), remedy=remedy)
    found = stored_tensors(path)
    recorded = _json(folder / ADAPTER_BASE)
    for name, crc32 in recorded["crc32"].items():
        if name not in found:
            what = (
                f"the files of this model do not contain {name}: this is a different model, or transformers converts "
                "the tensors when it loads the model"
            )
            raise UserError(
                what, where=str(path), remedy="use --lora adapter, or use RUN/final, which is already merged"
            )
        if zlib.crc32(_bytes_as(found[name], recorded["dtype"])) != crc32:
            what = f"this model is not the base model that the adapter was trained on: {name} differs"
            raise UserError(what, where=str(path), remedy=remedy)
    return {name: found[name] for name in recorded["crc32"]}


def _bytes_as(tensor: Stored, dtype: str) -> bytes:
    data = read_stored(tensor)
    return data if tensor.dtype == NAMES[dtype] else narrowed(widened(data, tensor.dtype), NAMES[dtype])


def _json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise WeightError(
            f"{file} cannot be read ({reason}); restore the file, or export a different checkpoint"
        ) from error
