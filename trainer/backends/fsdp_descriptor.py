"""What the rest of the program asks of FSDP2."""

from __future__ import annotations

from trainer.backends.descriptor import BackendDescriptor, StateDemand, StateLayout
from trainer.config import TrainerSettings


class FsdpDescriptor(BackendDescriptor):
    """Everything sharded over the ranks, on their devices or in host memory."""

    name = "fsdp"
    factory = "trainer.backends.fsdp:FsdpBackend"
    section = "fsdp"
    trains_critics = True
    when_colocated = "fsdp with trainer.fsdp.cpu_offload: true"

    def releases_devices(self, settings: TrainerSettings) -> bool:
        """Where its state is in host memory anyway."""
        return settings.fsdp.cpu_offload

    def offloaded(self, settings: TrainerSettings) -> TrainerSettings:
        """With `cpu_offload`."""
        return settings.model_copy(update={"fsdp": settings.fsdp.model_copy(update={"cpu_offload": True})})

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        return StateLayout.even(settings.ranks, on_host=settings.fsdp.cpu_offload)


FSDP = FsdpDescriptor()
