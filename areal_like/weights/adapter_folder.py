"""Reads an adapter (LoRA) in peft's format: its settings, and names and shapes of its tensors. Does not import torch.

An adapter that cannot be computed as W x + scale B A x is refused, with the key of its settings that prevents it. The
tensors are read in rollout/engine/adapters.py.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.weights.adapter import PARTS, own_name
from areal_like.weights.safetensors_header import shapes_in

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_SAVE_AGAIN = "save the adapter again with peft's save_pretrained"
UNUSED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern",
    "alpha_pattern", "target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
"""Keys of peft's settings that change what an adapter computes; each must be absent, false or empty."""
MAX_RANK = 1 << 20
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base unchanged."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter. shapes: (inputs, outputs) of each linear module that it changes, by the module's name."""

    folder: Path
    rank: int
    scale: float
    shapes: Mapping[str, tuple[int, int]]

    @property
    def file(self) -> Path:
        """File of its tensors."""
        return self.folder / TENSORS


def read_adapter(folder: Path) -> AdapterFolder:
    """Read the settings and the header of an adapter.

    Raises:
        UserError: the folder does not exist or holds no adapter, a file is damaged, or the adapter is of a kind that is
            not supported.
    """
    if not folder.is_dir():
        raise UserError("no such folder", where=str(folder), remedy="specify the folder of an adapter in peft's format")
    rank, scale = _checked(_settings(folder), str(folder / SETTINGS))
    if not (folder / TENSORS).is_file():
        raise UserError(
            f"the folder has no {TENSORS}", where=str(folder), remedy="save the adapter with peft's save_pretrained"
        )
    try:
        tensors = shapes_in(folder / TENSORS)
    except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the file cannot be read ({error})", where=str(folder / TENSORS)) from error
    return AdapterFolder(folder, rank, scale, _modules(tensors, rank, str(folder / TENSORS)))


def base_problem(adapter: AdapterFolder, weights: Mapping[str, tuple[int, ...]]) -> UserError | None:
    """Why the adapter cannot be used on a base with these tensors (shapes by name); None if it can.

    An empty shape stands for one that is not known.
    """
    linear = {name.removesuffix(".weight"): shape for name, shape in weights.items() if is_linear(name, shape)}
    for module, (inputs, outputs) in adapter.shapes.items():
        if f"{module}.weight" in weights and module not in linear:
            what = f"the adapter changes {module}, but an embedding, the head or a norm cannot have an adapter"
            return UserError(
                what, where=str(adapter.folder), remedy="train an adapter of linear layers other than the head"
            )
        if module not in linear:
            near = difflib.get_close_matches(module, list(linear), n=1)
            remedy = (
                f"the most similar module is {near[0]}" if near else "use the model that the adapter was trained on"
            )
            return UserError(f"the base model has no linear module {module}", where=str(adapter.folder), remedy=remedy)
        if linear[module] not in ((), (outputs, inputs)):
            has = " x ".join(str(size) for size in linear[module])
            what = (
                f"the adapter was trained on a base model in which {module} has {outputs} x {inputs} weights, but here "
                f"it has {has}"
            )
            return UserError(what, where=str(adapter.folder), remedy="use the model that the adapter was trained on")
    return None


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """True for the weight of a linear module that may have an adapter: head and embedding left out. `shape` is empty if
    it is not known."""
    has_two = len(shape) in (0, 2)
    return name.endswith(".weight") and has_two and not any(part in name for part in ("embed", "lm_head"))


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        raise UserError(
            f"the folder has no {SETTINGS}",
            where=str(folder),
            remedy="specify the folder of an adapter in peft's format",
        )
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"the file cannot be read as JSON ({error})"
        raise UserError(what, where=str(path), remedy=_SAVE_AGAIN) from error
    if not isinstance(found, dict):
        raise UserError(
            "the file is not a JSON object",
            where=str(path),
            remedy=_SAVE_AGAIN,
        )
    return found


def _checked(settings: Mapping[str, Any], where: str) -> tuple[int, float]:
    """Rank and scale. Raises UserError."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UserError(f"peft_type is {kind}, but only LORA is supported", where=where)
    changed = [key for key in UNUSED if settings.get(key)]
    if settings.get("bias", "none") != "none":
        changed.append("bias")
    if changed:
        what = f"{changed[0]} is {json.dumps(settings[changed[0]])}, which is not supported"
        raise UserError(
            what, where=where, remedy="merge the adapter into its base model with peft, and use the merged model"
        )
    init = settings.get("init_lora_weights", True)
    if init not in PLAIN_INITS:
        what = f"init_lora_weights is {json.dumps(init)}, which changes the base model"
        raise UserError(
            what,
            where=where,
            remedy="convert the adapter when you save it: pass path_initial_model_for_weight_conversion to "
            "save_pretrained",
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise UserError(f"r must be an integer from 1 to {MAX_RANK}, not {rank}", where=where)
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:  # also NaN
        raise UserError(f"lora_alpha must be a finite number, not {alpha}", where=where)
    return rank, float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _modules(tensors: Mapping[str, tuple[int, ...]], rank: int, where: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each module. Raises UserError."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        try:
            module, _, part = own_name(name).rpartition(".")
        except ValueError:
            what = f"the file contains {name}, which is not the matrix A or B of a linear module"
            raise UserError(
                what, where=where, remedy="merge the adapter into its base model with peft, and use the merged model"
            ) from None
        found.setdefault(module, {})[part] = shape
    modules = {}
    for module, parts in found.items():
        first, second = (parts.get(part, ()) for part in PARTS)
        if len(first) != 2 or len(second) != 2 or not first[0] == second[1] == rank:
            what = (
                f"the matrices A and B of {module} have the shapes {list(first)} and {list(second)}, which do not fit "
                f"rank {rank}"
            )
            raise UserError(what, where=where, remedy="save the adapter with peft's save_pretrained")
        modules[module] = (first[1], second[0])
    if not modules:
        raise UserError("the file contains no tensors", where=where, remedy=_SAVE_AGAIN)
    return modules
