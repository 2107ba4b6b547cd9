"""The descriptor of the embedded engine. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.setting_problem import Recovery
from rollout.config import EngineSettings
from rollout.engine.descriptor import EngineDescriptor, EngineJob, EngineMemory, ServingDemand


class EmbeddedDescriptor(EngineDescriptor):
    """Describes the embedded engine, which generates inside the worker's process."""

    name = "embedded"
    title = "the embedded engine"
    factory = "rollout.engine.embedded:make"
    joins_process_groups = True
    releases_memory = True
    can_be_emulated = True
    can_redraw = True

    def stop_string_problem(self, settings: EngineSettings) -> str:
        """It looks after each step."""
        return ""

    def memory(self, job: EngineJob, demand: ServingDemand) -> EngineMemory:
        """Memory of two sets of weights, one of which is filled while the other generates, and of the whole
        preallocated cache."""
        engine = job.settings
        cache = demand.cache_token_bytes * engine.num_slots * engine.max_context
        parts = {"weights": demand.weights_bytes, "next weights": demand.weights_bytes, "KV cache": cache}
        return EngineMemory(parts, sum(parts.values()))

    def recoveries(self, job: EngineJob) -> Iterator[Recovery]:
        """Recovery from an engine thread that hangs: its worker is restarted."""
        yield Recovery(
            "a rollout worker whose engine thread hangs is replaced",
            ("rollout.engine.stall_timeout_s", "launch.startup_timeout_s"),
            job.settings.stall_timeout_s + job.startup_timeout_s,
        )


EMBEDDED = EmbeddedDescriptor()
