"""Descriptor of plain torch in one process."""

from __future__ import annotations

from trainer.backends.descriptor import BackendDescriptor
from trainer.config import TrainerSettings


class TorchDescriptor(BackendDescriptor):
    """The full model in one process, without a process group."""

    name = "torch"
    factory = "trainer.backends.torch_single:TorchBackend"
    max_ranks = 1
    needs_process_group = False
    trains_critics = True
    when_recalling = "torch"
    trains_adapters = True
    gives_gradients = True
    when_colocated = "torch"

    def recalls_versions(self, settings: TrainerSettings) -> bool:
        """See BackendDescriptor."""
        return True

    def releases_devices(self, settings: TrainerSettings) -> bool:
        """Always true: it moves everything."""
        return True


TORCH = TorchDescriptor()
