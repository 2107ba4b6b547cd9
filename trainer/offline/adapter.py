"""The adapter (LoRA) of a run from files: added to the starting model, saved, restored, exported.

The computation is in trainer/model/lora.py, peft's files in trainer/adapter_files.py. A reward model is an adapter and
a head, which is trained in full. Its checkpoints also hold config.json, since the class of the base is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from areal_like.settings import DType
from areal_like.weights.weight_store import describe
from trainer.adapter_files import AdapterFiles, BaseIdentity, load_adapter
from trainer.export import cast, named_tensors, write_model
from trainer.host_copy import Part
from trainer.model.lora import Merged, add_adapter
from trainer.model.values import HEAD
from trainer.offline.config import OfflineLoraSettings
from trainer.training_state import ModelFiles
from trainer.weights.publish import tensor_bytes
from trainer.weights.tensor_file import FileFacts

_WEIGHT = "weight/"


@dataclass(frozen=True)
class OfflineAdapter:
    """Created by `add` from the full model. Writes checkpoints, as a trainer.training_state.PolicyFiles."""

    settings: OfflineLoraSettings
    files: AdapterFiles
    config_json: str | None
    """Of a reward model."""

    @staticmethod
    def add(
        model: PreTrainedModel,
        settings: OfflineLoraSettings,
        *,
        base: Path,
        dtype: DType,
        seed: int,
        checkpoint: Path | None,
    ) -> OfflineAdapter:
        """Freeze the model in folder `base` and add the adapter: a new one, or that of a checkpoint.

        Raises UserError for a target that does not exist, another base or another adapter; WeightError for a damaged
        file.
        """
        has_head = hasattr(model, HEAD)
        tensors = named_tensors(model)
        tensors.pop(f"{HEAD}.weight", None)  # it is trained
        described = describe("disk", 0, "base", {name: tensor_bytes(cast(one, dtype)) for name, one in tensors.items()})
        identity = BaseIdentity(str(base), dtype, {entry.name: entry.crc32 for entry in described.tensors})
        config_json = ModelFiles.of(model).config_json if has_head else None
        add_adapter(model, settings, seed=seed)
        if checkpoint is not None:
            load_adapter(checkpoint, model, settings, identity)
        return OfflineAdapter(settings, AdapterFiles.of(model, settings, identity), config_json)

    def kept(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that a checkpoint contains: what is trained, and AdamW's state."""
        trained = {_WEIGHT + name for name in self.files.trained}
        return [part for part in parts if not part.key.startswith(_WEIGHT) or part.key in trained]

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, FileFacts]:
        """Write the files of a checkpoint into an existing folder."""
        if self.config_json is not None:
            (folder / "config.json").write_text(self.config_json)
        return self.files.write(folder, weights)

    def export(
        self, folder: Path, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], *, dtype: DType
    ) -> None:
        """Write the result of the run into an existing folder. weights: full tensors by name."""
        if self.settings.export == "adapter":
            self.files.export(folder, weights, dtype=dtype)
        else:
            write_model(model, folder, dtype=dtype, weights=Merged(weights, self.settings.scale))
