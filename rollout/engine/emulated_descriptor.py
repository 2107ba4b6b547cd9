"""The descriptor of the emulated engine. It has no kind: the section `emulation` selects it."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import SettingProblem
from rollout.engine.descriptor import EngineDescriptor, EngineJob


class EmulatedDescriptor(EngineDescriptor):
    """Describes the engine that waits instead of computing."""

    name = "emulated"
    title = "the emulated engine"
    factory = "rollout.engine.emulated:make"

    def colocation_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Always a problem: there is no memory to release."""
        yield SettingProblem(
            ("placement", "emulation"),
            "placement: colocated requires an engine that can release its memory, but emulated devices have no memory",
            "set placement: disaggregated",
        )


EMULATED = EmulatedDescriptor()
