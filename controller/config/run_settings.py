"""The part of RunConfig that lookups of descriptors read.

It is a protocol because RunConfig calls these lookups itself; importing RunConfig would be an import cycle.
"""

from __future__ import annotations

from typing import Protocol

from areal_like.config import ModelSettings
from areal_like.emulation.settings import EmulationSettings
from areal_like.staleness import Mode
from controller.config.launch_settings import LaunchSettings
from rollout.config import RolloutSettings


class TrainerPool(Protocol):
    """The processes of the trainer. Satisfied by TrainerSettings."""

    @property
    def device(self) -> str: ...

    @property
    def ranks(self) -> int: ...


class RunSettings(Protocol):
    """Satisfied by RunConfig."""

    @property
    def mode(self) -> Mode: ...

    @property
    def model(self) -> ModelSettings: ...

    @property
    def rollout(self) -> RolloutSettings: ...

    @property
    def trainer(self) -> TrainerPool: ...

    @property
    def launch(self) -> LaunchSettings: ...

    @property
    def emulation(self) -> EmulationSettings | None: ...

    @property
    def is_colocated(self) -> bool:
        """Engines and trainer share devices."""
        ...
