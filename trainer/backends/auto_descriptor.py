"""Descriptor of `auto`, which chooses a backend when the model's size is known (choice.py)."""

from __future__ import annotations

from areal_like.device_names import names_gpu
from trainer.backends.descriptor import BackendDescriptor, PassDemand, Share, StateDemand, StateLayout
from trainer.backends.fsdp_descriptor import FSDP, sharded_state
from trainer.config import TrainerSettings


class AutoDescriptor(BackendDescriptor):
    """Described by its last option: everything sharded, in host memory if no GPU is large enough."""

    name = "auto"
    adapts_to_memory = True
    trains_critics = True
    when_recalling = "auto"
    trains_adapters = True
    gives_gradients = True
    splits_sequences = True
    splits_matrices = True
    replicates_shards = True

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """See BackendDescriptor."""
        return True

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        whole = sharded_state(settings, demand.outer_share, on_host=False)
        is_too_much = demand.num_bytes * whole.weights.part > demand.largest_device_bytes
        return sharded_state(settings, demand.outer_share, on_host=names_gpu(settings.device) and is_too_much)

    def reads_parts(self, settings: TrainerSettings) -> bool:
        """See working_bytes."""
        return settings.ranks > 1

    def fixed(self, settings: TrainerSettings) -> Share:
        """See working_bytes."""
        return FSDP.fixed(settings) if settings.ranks > 1 else super().fixed(settings)

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """With several ranks as FSDP, which shards the model."""
        if settings.ranks > 1:
            return FSDP.working_bytes(settings, demand)
        return super().working_bytes(settings, demand)

    def reducing_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """See working_bytes."""
        return FSDP.reducing_bytes(settings, demand) if settings.ranks > 1 else 0.0

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """See working_bytes."""
        return FSDP.publishing_bytes(settings, parameters) if settings.ranks > 1 else 0.0


AUTO = AutoDescriptor()
