"""Descriptor of FSDP2."""

from __future__ import annotations

from trainer.backends.descriptor import FLOAT32, BackendDescriptor, PassDemand, Share, StateDemand, StateLayout
from trainer.config import TrainerSettings


def num_shards(settings: TrainerSettings) -> int:
    """Return the number of ranks over which FSDP2 shards each replica, or each rank's part of the matrices in it."""
    return max(1, settings.ranks // (settings.fsdp.replicas * settings.tensor_parallel))


def sharded_state(settings: TrainerSettings, outer_share: float, *, on_host: bool) -> StateLayout:
    """Return the layout of one rank's state: replicas do not divide it, and tensor parallelism only the matrices.

    outer_share: the part of the state that tensor parallelism does not split.
    """
    shards, replicas, tensor = num_shards(settings), settings.fsdp.replicas, settings.tensor_parallel
    share = Share(((1 - outer_share) / tensor + outer_share) / shards, on_host)
    words = []
    if replicas > 1:
        words.append(f"1/{shards} on each rank of {replicas} replicas")
    if tensor > 1:
        words.append(f"matrices split over {tensor} ranks")
    if words and on_host:
        words.append("in host memory")
    return StateLayout(share, share, share, ", ".join(words))


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
    splits_matrices = True
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
        return sharded_state(settings, demand.outer_share, on_host=settings.fsdp.cpu_offload)

    def reads_parts(self, settings: TrainerSettings) -> bool:
        """True."""
        return True

    def fixed(self, settings: TrainerSettings) -> Share:
        """Its part, like that of the trained policy."""
        return Share(1 / num_shards(settings), on_host=settings.fsdp.cpu_offload)

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes of gathered parameters of two layers (one is fetched while one computes; all without
        `reshard_after_forward`), of embedding and head, and of the head's gradient, which stays unsharded until the
        pass ends.
        """
        layers = 2 * demand.layer if settings.fsdp.reshard_after_forward else demand.parameters - demand.outer
        return demand.compute_bytes * (layers / settings.tensor_parallel + demand.outer + demand.head)

    def reducing_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes of a layer's gradient, and of another one in the dtype of the reduction."""
        c = demand.compute_bytes
        summed = 2 if c != FLOAT32 and settings.fsdp.reduce_dtype == "bfloat16" else FLOAT32
        return (c + summed) * demand.layer / settings.tensor_parallel

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """Return the bytes of the full float32 tensors, which are gathered on the device."""
        return FLOAT32 * parameters


FSDP = FsdpDescriptor()
