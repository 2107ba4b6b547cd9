"""Chooses the backend for training, and creates it.

Backends are imported only when they are chosen: DeepSpeed is an extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import psutil
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from areal_like.import_path import import_factory
from trainer.backends.auto_descriptor import AUTO
from trainer.backends.descriptor import FLOAT32, KIND_KEY, BackendDescriptor
from trainer.backends.fsdp_descriptor import FSDP, num_shards
from trainer.backends.layout_faults import layout_faults
from trainer.backends.port import Backend, Setup
from trainer.backends.registry import find_backend, ranks_fault
from trainer.backends.torch_descriptor import TORCH
from trainer.config import TrainerSettings
from trainer.model.sequence_group import check_heads
from trainer.model.tensor_split import check_split
from trainer.ranks import Ranks

TRAINING_BYTES = 16
"""Bytes per parameter: itself, its gradient, AdamW's two moments, float32 each."""
USABLE_SHARE = 0.75
"""Usable share of a device's memory; the rest is for activations and logits."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a run, and the reason; the caller prints and records them. `settings`: those it runs with."""

    descriptor: BackendDescriptor
    reason: str
    settings: TrainerSettings

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.descriptor.name


def choose_backend(
    settings: TrainerSettings, num_parameters: int, device: torch.device, *, num_frozen: int = 0
) -> BackendChoice:
    """Return the backend named in `settings`, or the one that fits the model. Raises UserError if it cannot run.

    num_parameters: number of trained parameters.
    """
    descriptor = find_backend(settings.backend)
    for layout in layout_faults(descriptor, settings):
        raise UserError(layout.what, where=layout.keys[0], remedy=layout.remedy)
    if descriptor is AUTO:
        num_bytes = TRAINING_BYTES * num_parameters + FLOAT32 * num_frozen
        return fitting_backend(settings, num_bytes, device.type, _memory_bytes(device, settings.ranks))
    if (fault := ranks_fault(descriptor, settings.ranks)) is not None:
        what, remedy = fault
        raise UserError(what, where="trainer.ranks", remedy=remedy)
    if settings.lora is not None and not descriptor.trains_adapters:
        what = f"{descriptor.name} cannot train an adapter"
        raise UserError(
            what, where="trainer.lora", remedy="set trainer.backend to torch or fsdp, or set trainer.lora: null"
        )
    for required in descriptor.packages:
        if find_spec(required.module) is None:
            raise UserError(f"the package {required.module} is not installed", where=KIND_KEY, remedy=required.remedy)
    return BackendChoice(descriptor, "set in the configuration", settings)


def fitting_backend(
    settings: TrainerSettings, num_bytes: float, device_type: str, memory_bytes: float
) -> BackendChoice:
    """Choose the backend for `auto`, as a pure function. num_bytes: of the state. memory_bytes: of one rank's device.

    A single rank that holds everything needs no sharding; several ranks shard by FSDP2 (ZeRO needs an extra package and
    shards the same state); what still does not fit a GPU is moved to host memory.
    """
    need_bytes = num_bytes / (num_shards(settings) * settings.tensor_parallel)
    share = f"{need_bytes / 1e9:.3g} GB of weights, gradients and AdamW" + (" each" if settings.ranks > 1 else "")
    room = f"{USABLE_SHARE:.0%} of {memory_bytes / 1e9:.3g} GB"
    is_fitting = need_bytes <= USABLE_SHARE * memory_bytes
    if is_fitting or device_type != "cuda":
        verdict = (
            f"{share} fit into {room}" if is_fitting else f"{share} are more than {room}, and no backend needs less"
        )
        if settings.ranks == 1:
            return BackendChoice(TORCH, f"auto: one rank, {verdict}", settings)
        return BackendChoice(FSDP, f"auto: {settings.ranks} ranks, {verdict}", settings)
    ranks = "one rank" if settings.ranks == 1 else f"{settings.ranks} ranks"
    reason = f"auto: {ranks}, {share} are more than {room}: offloaded to host memory"
    return BackendChoice(FSDP, reason, FSDP.offloaded(settings))


def make_backend(descriptor: BackendDescriptor, model: PreTrainedModel, setup: Setup) -> Backend:
    """Create the backend from the full `model`, which it may distribute. Collective. Raises UserError."""
    backend: Backend = import_factory(descriptor.factory, KIND_KEY)(model, setup)
    return backend


def share_sequences(ranks: Ranks, choice: BackendChoice, model: PreTrainedModel) -> None:
    """Form the sequence groups of `trainer.sequence_parallel` or `trainer.tensor_parallel`. Collective.

    Raises UserError if the model's heads do not allow it.
    """
    size, tensor = choice.settings.sequence_parallel, choice.settings.tensor_parallel
    check_heads(model.config.get_text_config().num_attention_heads, size)
    if tensor > 1:
        check_split(model.config, tensor)
    ranks.share_sequences(size * tensor, splits_matrices=tensor > 1)


def _memory_bytes(device: torch.device, num_ranks: int) -> float:
    """Return the memory of one rank's device; on a CPU its part of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / num_ranks
