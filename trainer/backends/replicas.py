"""The number of sharded copies of the model (`trainer.fsdp.replicas`), for code outside this package. Torch-free."""

from __future__ import annotations

from trainer.config import TrainerSettings


def num_replicas(settings: TrainerSettings) -> int:
    """Number of copies of the model, each sharded over as many ranks; 1 without the setting."""
    return settings.fsdp.replicas


def with_replicas(settings: TrainerSettings, number: int) -> TrainerSettings:
    """A copy of the settings with another number of replicas."""
    return settings.model_copy(update={"fsdp": settings.fsdp.model_copy(update={"replicas": number})})
