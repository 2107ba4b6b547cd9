"""An adapter (LoRA) as files in peft's format: adapter_config.json and adapter_model.safetensors.

A third file identifies the base. Optimizer state and companions are written in training_state.py; merging is in
trainer/model/lora.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from areal_like.errors import UserError, WeightError
from areal_like.settings import DType
from areal_like.weights.adapter import PEFT_PREFIX, peft_name
from trainer.checkpoints.checkpoint import ADAPTER, ADAPTER_BASE, ADAPTER_CONFIG
from trainer.config import AdapterSettings
from trainer.export import cast
from trainer.model.lora import LoraLinear, is_adapters
from trainer.weights.tensor_file import FileFacts, write_tensors


@dataclass(frozen=True)
class BaseIdentity:
    """The base of an adapter: its folder, and the CRC-32 of every tensor in `dtype`, the dtype of versions."""

    path: str
    dtype: str
    crc32: dict[str, int]


@dataclass(frozen=True)
class AdapterFiles:
    """Writes named tensors as an adapter's folder. Created from the full model, before it is distributed over ranks.

    trained: names of the tensors that are trained: those of the adapter, and the head of a reward model.
    """

    config_json: str
    base: BaseIdentity
    trained: frozenset[str]

    @staticmethod
    def of(model: PreTrainedModel, settings: AdapterSettings, base: BaseIdentity) -> AdapterFiles:
        """Create the files of the adapter in `model`."""
        trained = frozenset(trained_tensors(model))
        whole = sorted(name.rpartition(".")[0] for name in trained if not is_adapters(name))
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if whole else "CAUSAL_LM",
            "base_model_name_or_path": base.path,
            "r": settings.rank,
            "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
            "target_modules": _target_modules(model),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "modules_to_save": whole or None,
            "inference_mode": True,
        }
        return AdapterFiles(json.dumps(config, indent=2) + "\n", base, trained)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, FileFacts]:
        """Write all files into an existing folder; tensors that are not trained are skipped."""
        (folder / ADAPTER_BASE).write_text(json.dumps({"dtype": self.base.dtype, "crc32": self.base.crc32}) + "\n")
        return self.export(folder, weights, dtype="float32")

    def export(self, folder: Path, weights: Mapping[str, torch.Tensor], *, dtype: DType) -> dict[str, FileFacts]:
        """Write the files that peft reads into an existing folder, with weights in `dtype`."""
        (folder / ADAPTER_CONFIG).write_text(self.config_json)
        tensors = {
            stored_name(name): cast(tensor.detach(), dtype).cpu().contiguous()
            for name, tensor in weights.items()
            if name in self.trained
        }
        return {ADAPTER: write_tensors(folder / ADAPTER, tensors)}


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the parameters that are trained, detached, by name."""
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


def stored_name(name: str) -> str:
    """Return the name of a trained tensor in peft's files."""
    return peft_name(name) if is_adapters(name) else PEFT_PREFIX + name


def load_adapter(folder: Path, model: PreTrainedModel, settings: AdapterSettings, base: BaseIdentity) -> None:
    """Load the tensors of a checkpoint into the adapter of a full model.

    Raises UserError if the adapter has another base, rank, alpha or other targets, WeightError if a file is damaged.
    """
    own = trained_tensors(model)
    _check_base(folder, base)
    _check_alpha(folder, settings)
    file = folder / ADAPTER
    try:
        with safe_open(str(file), framework="pt") as opened, torch.no_grad():
            stored = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            if stored != {stored_name(name): tuple(tensor.shape) for name, tensor in own.items()}:
                raise UserError(
                    "the checkpoint's adapter has a different rank or different target modules than trainer.lora",
                    where=str(folder),
                    remedy=f"use the run's original trainer.lora ({_describe(folder)}), or start a new run",
                )
            for name, tensor in own.items():
                tensor.copy_(opened.get_tensor(stored_name(name)))
    except (OSError, SafetensorError) as error:
        raise WeightError(f"{file} cannot be read ({error})") from error


def _check_base(folder: Path, base: BaseIdentity) -> None:
    try:
        recorded = json.loads((folder / ADAPTER_BASE).read_text())
        is_same = (recorded["dtype"], recorded["crc32"]) == (base.dtype, base.crc32)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{folder / ADAPTER_BASE} cannot be read ({error})") from error
    if not is_same:
        raise UserError(
            f"the adapter in the checkpoint was not trained on the base model {base.path}",
            where=str(folder),
            remedy="resume with the model and model.dtype that the run started with",
        )


def _check_alpha(folder: Path, settings: AdapterSettings) -> None:
    try:
        alpha = float(json.loads((folder / ADAPTER_CONFIG).read_text())["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{folder / ADAPTER_CONFIG} cannot be read ({error})") from error
    if alpha != settings.alpha:  # with it, the same A and B are another policy
        raise UserError(
            f"the checkpoint's adapter has alpha {alpha:g}, but trainer.lora.alpha is {settings.alpha:g}",
            where=str(folder),
            remedy=f"set trainer.lora.alpha={alpha:g}, or start a new run",
        )


def _target_modules(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the targets' names, as engines expect, if they match the targets and nothing else."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]
    ends = {name.rpartition(".")[2] for name in adapted}
    is_exact = {name for name in linear if name.rpartition(".")[2] in ends} == set(adapted)
    return sorted(ends) if is_exact else adapted


def _describe(folder: Path) -> str:
    try:
        config: Any = json.loads((folder / ADAPTER_CONFIG).read_text())
        return f"rank {config['r']}, targets {', '.join(config['target_modules'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return "adapter_config.json is damaged"
