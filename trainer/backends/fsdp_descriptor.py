"""Descriptor of FSDP2."""

from __future__ import annotations

from dataclasses import replace

from trainer.backends.descriptor import FLOAT32, BackendDescriptor, PassDemand, Share, StateDemand, StateLayout
from trainer.config import TrainerSettings


def num_shards(settings: TrainerSettings) -> int:
    """Return the number of ranks over which each copy of the model is sharded."""
    return max(1, settings.ranks // settings.fsdp.replicas)


def sharded_state(settings: TrainerSettings, *, on_host: bool) -> StateLayout:
    """Return the layout of one rank's state: replicas do not divide it."""
    shards, replicas = num_shards(settings), settings.fsdp.replicas
    even = StateLayout.even(shards, on_host=on_host)
    if replicas == 1:
        return even
    words = f"1/{shards} on each rank of {replicas} replicas" + (", in host memory" if on_host else "")
    return replace(even, words=words)


class FsdpDescriptor(BackendDescriptor):
    """All state sharded over the ranks, on their devices or in host memory."""

    name = "fsdp"
    factory = "trainer.backends.fsdp:FsdpBackend"
    fixed_factory = "trainer.backends.fsdp_fixed:FixedShards"
    section = "fsdp"
    trains_critics = True
    when_recalling = "fsdp"
    trains_adapters = True
    gives_gradients = True
    splits_sequences = True
    replicates_shards = True
    gathers_in_compute_type = True
    when_colocated = "fsdp with trainer.fsdp.cpu_offload: true"

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """See BackendDescriptor."""
        return True

    def releases_devices(self, settings: TrainerSettings) -> bool:
        """True if its state is in host memory."""
        return settings.fsdp.cpu_offload

    def offloaded(self, settings: TrainerSettings) -> TrainerSettings:
        """Return the settings with `cpu_offload`."""
        return settings.model_copy(update={"fsdp": settings.fsdp.model_copy(update={"cpu_offload": True})})

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        return sharded_state(settings, on_host=settings.fsdp.cpu_offload)

    def reads_parts(self, settings: TrainerSettings) -> bool:
        """True."""
        return True

    def fixed(self, settings: TrainerSettings) -> Share:
        """Its part, like that of the trained policy."""
        return Share(1 / num_shards(settings), on_host=settings.fsdp.cpu_offload)

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes of gathered parameters of two layers (one is fetched while one computes; all without
        `reshard_after_forward`) and of embedding and head, whose gradients also stay unsharded until the pass ends; and
        of a layer's gradient, unsharded, and in the dtype of the reduction.
        """
        c = demand.compute_bytes
        summed = 2 if c != FLOAT32 and settings.fsdp.reduce_dtype == "bfloat16" else FLOAT32
        layers = 2 * demand.layer if settings.fsdp.reshard_after_forward else demand.parameters - demand.outer
        return c * (layers + 2 * demand.outer) + (c + summed) * demand.layer

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """Return the bytes of the full float32 tensors, which are gathered on the device."""
        return FLOAT32 * parameters


FSDP = FsdpDescriptor()
