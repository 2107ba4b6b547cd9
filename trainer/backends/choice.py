"""Which backend trains, and why.

Owns: `choose_backend`, `make_backend`, and the checks that turn a wrong combination into one sentence. Refuses: running
anything. Backends are imported only when they are chosen: DeepSpeed is an extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import psutil
import torch
from transformers import PreTrainedModel

from areal_like.errors import UserError
from trainer.backends.port import Backend, Setup
from trainer.config import TrainerSettings

BackendName = Literal["torch", "fsdp", "deepspeed"]

TRAINING_BYTES = 16
"""Of one parameter: itself, its gradient, AdamW's two moments, float32 each."""
USABLE_SHARE = 0.75
"""Of a device's memory; the rest is for activations and logits."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend a run uses, and why; printed and recorded by the caller. `settings` are those it runs with."""

    name: BackendName
    reason: str
    settings: TrainerSettings


def choose_backend(settings: TrainerSettings, num_parameters: int, device: torch.device) -> BackendChoice:
    """The backend that `settings` name, or the one that fits the model. Raises UserError where it cannot run."""
    if settings.backend == "auto":
        return fitting_backend(settings, num_parameters, device.type, _memory_bytes(device, settings.ranks))
    if settings.backend == "torch" and settings.ranks > 1:
        raise UserError(
            f"backend torch trains in one process, and trainer.ranks is {settings.ranks}",
            where="trainer.ranks",
            remedy="trainer.backend: fsdp, deepspeed or auto",
        )
    if settings.backend == "deepspeed" and find_spec("deepspeed") is None:
        raise UserError(
            "deepspeed is not installed",
            where="trainer.backend",
            remedy="pip install 'areal-like[deepspeed]', or trainer.backend: fsdp",
        )
    return BackendChoice(settings.backend, "named in the configuration", settings)


def fitting_backend(
    settings: TrainerSettings, num_parameters: int, device_type: str, memory_bytes: float
) -> BackendChoice:
    """`auto`, as a pure function. memory_bytes: of one rank's device.

    One rank that holds everything needs no sharding; several ranks shard by FSDP2 (ZeRO needs an extra package and
    shards the same things); what does not fit a GPU even so goes to host memory.
    """
    need_bytes = TRAINING_BYTES * num_parameters / settings.ranks
    share = f"{need_bytes / 1e9:.3g} GB of weights, gradients and AdamW" + (" each" if settings.ranks > 1 else "")
    room = f"{USABLE_SHARE:.0%} of {memory_bytes / 1e9:.3g} GB"
    is_fitting = need_bytes <= USABLE_SHARE * memory_bytes
    if is_fitting or device_type != "cuda":
        verdict = f"{share} fit {room}" if is_fitting else f"{share} are more than {room}, and no backend needs less"
        if settings.ranks == 1:
            return BackendChoice("torch", f"auto: one rank, {verdict}", settings)
        return BackendChoice("fsdp", f"auto: {settings.ranks} ranks, {verdict}", settings)
    offloaded = settings.model_copy(update={"fsdp": settings.fsdp.model_copy(update={"cpu_offload": True})})
    ranks = "one rank" if settings.ranks == 1 else f"{settings.ranks} ranks"
    return BackendChoice("fsdp", f"auto: {ranks}, {share} are more than {room}: offloaded to host memory", offloaded)


def make_backend(name: BackendName, model: PreTrainedModel, setup: Setup) -> Backend:
    """Spread `model`, whole until now, as the backend `name` does. Collective. Raises UserError."""
    if name == "torch":
        from trainer.backends.torch_single import TorchBackend

        return TorchBackend(model, setup)
    if name == "fsdp":
        from trainer.backends.fsdp import FsdpBackend

        return FsdpBackend(model, setup)
    from trainer.backends.zero import ZeroBackend

    return ZeroBackend(model, setup)


def _memory_bytes(device: torch.device, num_ranks: int) -> float:
    """Memory of one rank's device; on a CPU its part of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / num_ranks
