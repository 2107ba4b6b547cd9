"""What the rest of the program must know of the engine of emulated devices.

Owns: the answers of `EngineDescriptor` for it. It has no kind: the section `emulation` chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from rollout.engine.descriptor import EngineDescriptor, EngineJob


class EmulatedDescriptor(EngineDescriptor):
    """Takes time instead of computing."""

    name = "emulated"
    title = "the emulated engine"
    factory = "rollout.engine.emulated:make"

    def colocation_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Always: there is no memory to hand over."""
        yield SettingProblem(
            ("placement", "emulation"), "emulated devices have no memory to release", "placement: disaggregated"
        )


EMULATED = EmulatedDescriptor()
