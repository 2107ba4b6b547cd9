"""The adapter (LoRA) of a policy in training: added to the frozen base, restored, published, saved.

It defines the identity of the base, the tensors and the manifest of a version, and the contents of a checkpoint. The
computation is in model/lora.py, the file format in adapter_files.py, and the check that engines use the adapter in
adapter_check.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from areal_like.weights.adapter import AdapterInfo, AdapterPayload, peft_name
from areal_like.weights.delta import digest
from areal_like.weights.payload_layout import TensorBytes
from areal_like.weights.weight_store import describe
from trainer.adapter_files import AdapterFiles, BaseIdentity, load_adapter
from trainer.checkpoints.checkpoint import ADAPTER
from trainer.config import AdapterSettings, LoraSettings
from trainer.export import cast, named_tensors
from trainer.host_copy import Part
from trainer.model.lora import Merged, adapter_tensors, add_adapter, is_adapters
from trainer.weights.publish import snapshot, tensor_bytes

_WEIGHT = "weight/"


class PolicyAdapter:
    """Created by `add` from the full model, in the same way on every rank."""

    def __init__(self, settings: LoraSettings, spec: ProcessSpec, base: BaseIdentity, base_digest: str) -> None:
        self.settings, self._dtype = settings, spec.model.dtype
        self._base, self._base_digest = base, base_digest

    @staticmethod
    def add(model: PreTrainedModel, settings: LoraSettings, spec: ProcessSpec) -> PolicyAdapter:
        """Freeze the model and add the adapter: a new one, or that of the checkpoint `spec.resume_from`.

        Raises UserError for a target that does not exist, another base, another adapter, or an adapter that is to be
        published without the base and cannot be; WeightError for a damaged file.
        """
        dtype = spec.model.dtype
        whole = {name: tensor_bytes(cast(tensor, dtype)) for name, tensor in named_tensors(model).items()}
        described = describe("disk", 0, "base", whole)
        if settings.publish == "adapter":
            _check_names(Path(str(spec.model.path)), whole)
        base = BaseIdentity(str(spec.model.path), dtype, {entry.name: entry.crc32 for entry in described.tensors})
        add_adapter(model, settings, seed=spec.seed)
        if spec.resume_from is not None:
            load_adapter(Path(spec.resume_from), model, settings, base)
        return PolicyAdapter(settings, spec, base, digest(described))

    def files(self, model: PreTrainedModel) -> AdapterFiles:
        """Return the writer of its checkpoints."""
        return AdapterFiles.of(model, self.settings, self._base)

    def is_published(self, name: str) -> bool:
        """True for a tensor that is part of a version."""
        return self.settings.publish == "merged" or is_adapters(name)

    def version_of(self, policy: Mapping[str, torch.Tensor]) -> tuple[dict[str, TensorBytes], AdapterInfo]:
        """Return a copy of the published tensors and the entry of the manifest. policy: full tensors by name."""
        alone = {peft_name(name): tensor for name, tensor in adapter_tensors(policy).items()}
        adapter = snapshot(alone, dtype="float32")
        adapter_digest = digest(describe("disk", 0, "adapter", adapter))
        if self.settings.publish == "merged":
            merged = snapshot(self.merged(policy), dtype=self._dtype)
            return merged, AdapterInfo(base_digest=self._base_digest, adapter_digest=adapter_digest)
        lone = AdapterPayload(scale=self.settings.scale, dtype=self._dtype, base=self._base.crc32)
        return adapter, AdapterInfo(base_digest=self._base_digest, adapter_digest=adapter_digest, lone=lone)

    def merged(self, policy: Mapping[str, torch.Tensor]) -> Merged:
        """Return the base with the adapter merged into it."""
        return Merged(policy, self.settings.scale)


def _check_names(folder: Path, names: Collection[str]) -> None:
    """Raise UserError if workers could not merge by name: in files that are pickled or converted when loaded."""
    stored: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            stored |= set(opened.keys())
    if missing := sorted(set(names) - stored):
        what = (
            f"workers cannot merge the adapter, because the safetensors files of the model do not contain {missing[0]}"
        )
        raise UserError(what, where="trainer.lora.publish", remedy="publish: merged")


def kept(parts: Sequence[Part]) -> list[Part]:
    """Return the policy's parts that a checkpoint contains: the adapter and AdamW's state."""
    return [part for part in parts if not part.key.startswith(_WEIGHT) or is_adapters(part.key)]


def weight_parts(parts: Sequence[Part]) -> list[Part]:
    """Return the adapter's weights among the policy's parts, which share memory with the trained parameters."""
    return [part for part in parts if part.key.startswith(_WEIGHT) and is_adapters(part.key)]


def check_kind(checkpoint: Path, settings: AdapterSettings | None) -> None:
    """Raise UserError if a checkpoint has an adapter and the run has none, or the other way round."""
    has_adapter = (checkpoint / ADAPTER).is_file()
    if has_adapter and settings is None:
        what, remedy = (
            "the checkpoint contains an adapter, but trainer.lora is not set",
            "set trainer.lora as in the original run",
        )
    elif settings is not None and not has_adapter:
        what, remedy = (
            "trainer.lora is set, but the checkpoint contains a full model",
            "set lora: null, or start a new run",
        )
    else:
        return
    raise UserError(what, where=str(checkpoint), remedy=remedy)
