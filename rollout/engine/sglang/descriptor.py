"""The descriptor of the SGLang engine. Imports neither torch nor anything of SGLang's environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_like.device_names import names_cpu
from areal_like.errors import UserError
from areal_like.setting_problem import Recovery, SettingProblem
from rollout.config import EngineSettings
from rollout.engine.descriptor import (
    PYTHON_KEY,
    EngineDescriptor,
    EngineEnvironment,
    EngineJob,
    EngineMemory,
    ServingDemand,
)
from rollout.engine.server.descriptor_parts import server_recoveries, settings_with_more_gpus
from rollout.engine.sglang import option_rules
from rollout.engine.sglang.arguments import extra_words
from rollout.engine.sglang.environment import ENVIRONMENT, PYTHON

MEMORY_FRACTION = 0.85
"""Assumed value if `memory_fraction` is not set; SGLang then chooses 0.8 to 0.9 by GPU and model."""


class SGLangDescriptor(EngineDescriptor):
    """Describes the SGLang engine: one server per worker, in a separate Python environment."""

    name = "sglang"
    title = "SGLang"
    factory = "rollout.engine.sglang.making:make"
    section = "sglang"
    starts_with_weights = True
    environment = EngineEnvironment(python=PYTHON, package="sglang", build="make sglang-cpu")
    joins_process_groups = True
    releases_memory = True

    def devices_per_worker(self, settings: EngineSettings) -> int:
        """`tp_size`."""
        return settings.sglang.tp_size

    def settings_for_devices(self, devices: int) -> dict[str, str]:
        """`tp_size`."""
        return {"rollout.engine.sglang.tp_size": str(devices)}

    def interpreter(self, settings: EngineSettings) -> str | None:
        """The server's interpreter; None with `attach`, where servers run already."""
        return None if settings.sglang.attach else settings.python or PYTHON

    def server_ports(self, job: EngineJob) -> tuple[str, Sequence[int]]:
        """`port` and the following ones, one per worker."""
        sglang = job.settings.sglang
        ports = [port for index in range(job.num_workers) if (port := sglang.port_of(index)) is not None]
        return "rollout.engine.sglang.port", () if sglang.attach else ports

    def setting_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Options that contradict each other or the device."""
        yield from option_rules.option_problems(job)

    def model_problems(self, job: EngineJob, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Options that the model does not support."""
        yield from option_rules.model_problems(job.settings.sglang, model)

    def environment_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Problems of the interpreter, its SGLang version, and arguments that this version does not have."""
        settings = job.settings
        if settings.sglang.attach:
            return
        try:
            python = ENVIRONMENT.find_python(settings.python or PYTHON)
            ENVIRONMENT.check_version(python)
            if settings.sglang.arguments:
                extra_words(
                    settings, ENVIRONMENT.argument_table(python, is_cpu=names_cpu(settings.device)), job.interruption
                )
        except UserError as error:
            is_local = error.where == PYTHON_KEY
            yield SettingProblem((error.where,), error.what, error.remedy, is_local=is_local)

    def group_problems(self, job: EngineJob, model: Mapping[str, Any] | None) -> Iterator[SettingProblem]:
        """Reasons against a process group: it works on CPUs, in one process, for models whose layout in a server is
        known."""
        yield from option_rules.group_problems(job, model)

    def colocation_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Conflicts with shared devices: attached servers, and a second rule for when memory is released."""
        yield from option_rules.colocation_problems(job.settings.sglang)

    def stop_string_problem(self, settings: EngineSettings) -> str:
        """Routed experts are reported for an attempt that the server ends."""
        if settings.sglang.routed_experts:
            return "rollout.engine.sglang.routed_experts requires that the server ends answers"
        return ""

    def records_routes(self, settings: EngineSettings) -> bool:
        """An option of the server."""
        return settings.sglang.routed_experts

    def memory(self, job: EngineJob, demand: ServingDemand) -> EngineMemory:
        """Memory of one GPU: the weights are divided among the GPUs of a worker; the cache takes the rest of
        `memory_fraction`, and must have room for one sequence of the greatest length. Memory outside the fraction is
        for activations and CUDA graphs.
        """
        engine = job.settings
        devices, fraction = engine.sglang.tp_size, engine.sglang.memory_fraction or MEMORY_FRACTION
        width = 0.5 if engine.sglang.quantization == "fp8" else 1.0
        weights = demand.weights_bytes * width / devices
        token = demand.cache_token_bytes * (0.5 if engine.sglang.kv_cache_dtype != "auto" else 1.0) / devices
        longest = token * engine.max_context
        if demand.device_bytes is None:
            parts = {"weights": weights, "KV cache": longest * engine.num_slots}
            return EngineMemory(parts, (weights + longest) / fraction)
        pool = max(0.0, fraction * demand.device_bytes - weights)
        tokens = pool / token
        parts = {"weights": weights, "KV cache": pool, "activations, graphs": (1 - fraction) * demand.device_bytes}
        words = (
            f"a cache of {tokens:,.0f} tokens, for {tokens / engine.max_context:,.1f} sequences of "
            f"{engine.max_context:,} tokens"
        )
        return EngineMemory(parts, (weights + longest) / fraction, words)

    def memory_settings(self, job: EngineJob) -> Iterator[tuple[str, EngineSettings]]:
        """Settings with more GPUs per worker."""
        return settings_with_more_gpus("sglang", job.settings)

    def rounding_key(self, settings: EngineSettings) -> str:
        """The setting of fp8 weights or of an fp8 cache."""
        return option_rules.rounding_key(settings.sglang)

    def recoveries(self, job: EngineJob) -> Iterator[Recovery]:
        """Recoveries from servers that hang: they are replaced."""
        sglang = job.settings.sglang
        start_s = sglang.control_timeout_s if sglang.attach else job.startup_timeout_s
        return server_recoveries("sglang", "an SGLang server", job.settings, start_s)

    def advice(self, job: EngineJob) -> Iterator[str]:
        """Advice on shared devices, which have no effect on CPUs."""
        if job.is_colocated and names_cpu(job.settings.device):
            yield (
                "placement: on a CPU, SGLang servers do not release memory while the trainer works; everything else "
                "works as on GPUs"
            )


SGLANG = SGLangDescriptor()
