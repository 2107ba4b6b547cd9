"""Descriptor of DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from trainer.backends.descriptor import (
    FLOAT32,
    BackendDescriptor,
    PassDemand,
    RequiredPackage,
    Share,
    StateDemand,
    StateLayout,
)
from trainer.config import TrainerSettings

BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of reduce_bucket_size (0.19)."""
LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of max_live_parameters."""


class ZeroDescriptor(BackendDescriptor):
    """The stage determines what is sharded."""

    name = "deepspeed"
    factory = "trainer.backends.zero:ZeroBackend"
    section = "deepspeed"
    trains_critics = True
    when_recalling = "deepspeed with trainer.deepspeed.stage: 1 or 2"
    packages = (RequiredPackage("deepspeed", "pip install 'areal-like[deepspeed]', or set trainer.backend: fsdp"),)

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """True for stages 1 and 2: stage 3 may keep gathered copies of its shards, which would become stale."""
        return settings.deepspeed.stage < 3

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        zero, ranks = settings.deepspeed, settings.ranks
        return StateLayout(
            weights=Share(1 / (ranks if zero.stage == 3 else 1), on_host=zero.offload_param),
            gradients=Share(1 / (ranks if zero.stage >= 2 else 1)),
            moments=Share(1 / ranks, on_host=zero.offload_optimizer),
            words=f"ZeRO {zero.stage} over {ranks} rank{'s' * (ranks > 1)}",
        )

    def working_bytes(self, settings: TrainerSettings, demand: PassDemand) -> float:
        """Return the bytes of its float32 copy of this rank's part of the weights, a bucket of gradients, and the cast
        copies of autocast; in stage 3 of the parameters that may be gathered at once.
        """
        zero = settings.deepspeed
        own = 0.0 if zero.offload_optimizer else FLOAT32 * demand.parameters / settings.ranks
        bucket = FLOAT32 * min(zero.reduce_bucket_size or BUCKET_ELEMENTS, demand.parameters)
        cast = super().working_bytes(settings, demand)
        if zero.stage < 3:
            return own + bucket + cast
        live = min(zero.max_live_parameters or LIVE_PARAMETERS, demand.parameters)
        return own + bucket + FLOAT32 * live + min(cast, demand.compute_bytes * live)

    def publishing_bytes(self, settings: TrainerSettings, parameters: float) -> float:
        """Return the bytes of the full float32 tensors, which only stage 3 gathers on the device."""
        return FLOAT32 * parameters if settings.deepspeed.stage == 3 else 0.0

    def setting_problems(self, settings: TrainerSettings) -> Iterator[SettingProblem]:
        """Yield a contradiction that DeepSpeed does not report itself."""
        zero = settings.deepspeed
        if zero.offload_param and zero.stage != 3:
            yield SettingProblem(
                ("trainer.deepspeed.offload_param", "trainer.deepspeed.stage"),
                f"ZeRO stage {zero.stage} keeps all parameters on every rank, so there are no shards to offload",
                "set stage: 3, or offload_param: false",
            )


ZERO = ZeroDescriptor()
