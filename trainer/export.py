"""Writes a model as a Hugging Face folder: weights, config, and its tokenizer and generation files.

Optimizer state and checkpoints are written in training_state.py and checkpoints/checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from areal_like.errors import UserError
from areal_like.plain_folder import filled_in_memory
from areal_like.settings import DType
from trainer.checkpoints.atomic_folder import atomic_folder
from trainer.checkpoints.companion_files import copy_companions
from trainer.checkpoints.provenance import write_provenance

TORCH_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


Policy = PreTrainedModel | Mapping[str, torch.Tensor]
"""A model, or its full tensors by name if the model itself has parts of them."""


def named_tensors(model: Policy) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by Hugging Face name, detached; of tied ones only the first name."""
    tensors = model if isinstance(model, Mapping) else first_named(model)
    return {name: tensor.detach() for name, tensor in tensors.items()}


def first_named(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers, not detached, by the first of their names."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def cast(tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return `tensor` in `dtype`; integer tensors are not changed."""
    return tensor.to(TORCH_DTYPES[dtype]) if tensor.is_floating_point() else tensor


def write_model(
    model: PreTrainedModel, folder: Path, *, dtype: DType, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write weights (safetensors) and config.json into an existing folder; write companions afterwards.

    weights: the full tensors by name, if those of `model` are parts.
    """
    holder: Any = model
    generation = getattr(holder, "generation_config", None)  # a reward model has none
    if generation is not None:
        holder.generation_config = GenerationConfig()  # its file is a companion, copied without validation
    try:
        if dtype == "float32" and weights is None:
            model.save_pretrained(folder)
        else:
            tensors = {name: cast(tensor, dtype) for name, tensor in named_tensors(weights or model).items()}
            model.save_pretrained(folder, state_dict=tensors)
            file = folder / "config.json"
            config = json.loads(file.read_text())
            config.pop("torch_dtype", None)
            file.write_text(json.dumps(config | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")
    finally:
        if generation is not None:
            holder.generation_config = generation
        (folder / "generation_config.json").unlink(missing_ok=True)


def write_generation_config(folder: Path, *, eos_token_id: int | list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that `folder` has a generation_config.json with the ids that end an answer.

    An existing file with end ids is not changed. Raises UserError if it exists and is not a JSON object.
    """
    file = folder / "generation_config.json"
    known: dict[str, Any] = {}
    if file.is_file():
        try:
            known = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise UserError(
                "the file is not a JSON object", where=str(file), remedy="correct or remove the file"
            ) from error
        if known.get("eos_token_id") is not None:
            return
    ids = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    wanted = {name: value for name, value in ids.items() if value is not None}
    file.write_text(json.dumps(wanted | known | {"eos_token_id": eos_token_id}, indent=2, sort_keys=True) + "\n")


def export_policy(
    model: PreTrainedModel,
    source: Path,
    target: Path,
    *,
    dtype: DType,
    weights: Mapping[str, torch.Tensor] | None = None,
    checkpoint: Path | None = None,
) -> Path:
    """Export the policy for `from_pretrained`, completely or not at all. Companions are copied from `source`.

    checkpoint: one of the same version, named in provenance.json; None: that file is not written.
    """
    with atomic_folder(target) as partial:
        with filled_in_memory(partial) as folder:
            write_model(model, folder, dtype=dtype, weights=weights)
        copy_companions(source, partial)
        if checkpoint is not None:
            write_provenance(partial, checkpoint)
    return target
