"""What the rest of the program asks of DeepSpeed's ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from trainer.backends.descriptor import BackendDescriptor, RequiredPackage, Share, StateDemand, StateLayout
from trainer.config import TrainerSettings


class ZeroDescriptor(BackendDescriptor):
    """The stage decides what is sharded."""

    name = "deepspeed"
    factory = "trainer.backends.zero:ZeroBackend"
    section = "deepspeed"
    trains_critics = True
    packages = (RequiredPackage("deepspeed", "pip install 'areal-like[deepspeed]', or trainer.backend: fsdp"),)

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        zero, ranks = settings.deepspeed, settings.ranks
        return StateLayout(
            weights=Share(1 / (ranks if zero.stage == 3 else 1), on_host=zero.offload_param),
            gradients=Share(1 / (ranks if zero.stage >= 2 else 1)),
            moments=Share(1 / ranks, on_host=zero.offload_optimizer),
            words=f"ZeRO {zero.stage} over {ranks} rank{'s' * (ranks > 1)}",
        )

    def setting_problems(self, settings: TrainerSettings) -> Iterator[SettingProblem]:
        """DeepSpeed judges its own options; it says nothing about this one."""
        zero = settings.deepspeed
        if zero.offload_param and zero.stage != 3:
            yield SettingProblem(
                ("trainer.deepspeed.offload_param", "trainer.deepspeed.stage"),
                f"ZeRO stage {zero.stage} keeps whole parameters on every rank: there are no shards to offload",
                "stage: 3, or offload_param: false",
            )


ZERO = ZeroDescriptor()
