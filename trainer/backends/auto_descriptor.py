"""What the rest of the program asks of `auto`, which chooses a backend when the model's size is known (choice.py)."""

from __future__ import annotations

from trainer.backends.descriptor import BackendDescriptor, StateDemand, StateLayout
from trainer.config import TrainerSettings


class AutoDescriptor(BackendDescriptor):
    """Judged by what it can fall back on: everything sharded, in host memory where no GPU is large enough."""

    name = "auto"
    adapts_to_memory = True
    trains_critics = True

    def state(self, settings: TrainerSettings, demand: StateDemand) -> StateLayout:
        """See BackendDescriptor."""
        is_too_much = demand.num_bytes / settings.ranks > demand.largest_device_bytes
        return StateLayout.even(settings.ranks, on_host=settings.device.startswith("cuda") and is_too_much)


AUTO = AutoDescriptor()
