"""The descriptor of the vLLM engine. Imports neither torch nor anything of vLLM's environment."""

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
from rollout.engine.vllm import option_rules
from rollout.engine.vllm.arguments import extra_words
from rollout.engine.vllm.environment import ENVIRONMENT, PYTHON

MEMORY_FRACTION = 0.9
"""Assumed value if `memory_fraction` is not set."""


class VLLMDescriptor(EngineDescriptor):
    """Describes the vLLM engine: one server per worker, in a separate Python environment."""

    name = "vllm"
    title = "vLLM"
    factory = "rollout.engine.vllm.making:make"
    section = "vllm"
    starts_with_weights = True
    environment = EngineEnvironment(python=PYTHON, package="vllm", build="make vllm-cpu")

    def devices_per_worker(self, settings: EngineSettings) -> int:
        """`tp_size`."""
        return settings.vllm.tp_size

    def settings_for_devices(self, devices: int) -> dict[str, str]:
        """`tp_size`."""
        return {"rollout.engine.vllm.tp_size": str(devices)}

    def server_ports(self, job: EngineJob) -> tuple[str, Sequence[int]]:
        """`port` and the following ones, one per worker."""
        vllm = job.settings.vllm
        ports = [port for index in range(job.num_workers) if (port := vllm.port_of(index)) is not None]
        return "rollout.engine.vllm.port", ports

    def stop_string_problem(self, settings: EngineSettings) -> str:
        """Its requests look after each event."""
        return ""

    def setting_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Options that contradict each other or the device."""
        yield from option_rules.option_problems(job)

    def model_problems(self, job: EngineJob, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Models that vLLM does not support here."""
        yield from option_rules.model_problems(job, model)

    def environment_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Problems of the interpreter, its vLLM version, and arguments that this version does not have."""
        settings = job.settings
        try:
            python = ENVIRONMENT.find_python(settings.python or PYTHON)
            ENVIRONMENT.check_version(python)
            if settings.vllm.arguments:
                extra_words(settings, ENVIRONMENT.argument_table(python, is_cpu=names_cpu(settings.device)))
        except UserError as error:
            is_local = error.where == PYTHON_KEY
            yield SettingProblem((error.where,), error.what, error.remedy, is_local=is_local)

    def memory(self, job: EngineJob, demand: ServingDemand) -> EngineMemory:
        """Memory of one GPU: the weights are divided among the GPUs of a worker; the cache takes the rest of
        `memory_fraction`, and must have room for one sequence of the greatest length. On a CPU the cache has room for
        every slot.
        """
        engine = job.settings
        devices, fraction = engine.vllm.tp_size, engine.vllm.memory_fraction or MEMORY_FRACTION
        weights = demand.weights_bytes / devices
        token = demand.cache_token_bytes / devices
        longest = token * engine.max_context
        if demand.device_bytes is None or names_cpu(engine.device):
            parts = {"weights": weights, "KV cache": longest * engine.num_slots}
            return EngineMemory(parts, weights + longest)
        pool = max(0.0, fraction * demand.device_bytes - weights)
        parts = {"weights": weights, "KV cache": pool, "activations, graphs": (1 - fraction) * demand.device_bytes}
        words = (
            f"a cache of {pool / token:,.0f} tokens, for {pool / longest:,.1f} sequences of {engine.max_context:,} "
            "tokens"
        )
        return EngineMemory(parts, (weights + longest) / fraction, words)

    def memory_settings(self, job: EngineJob) -> Iterator[tuple[str, EngineSettings]]:
        """Settings with more GPUs per worker."""
        return settings_with_more_gpus("vllm", job.settings)

    def recoveries(self, job: EngineJob) -> Iterator[Recovery]:
        """Recoveries from servers that hang: they are replaced."""
        return server_recoveries("vllm", "a vLLM server", job.settings, job.startup_timeout_s)


VLLM = VLLMDescriptor()
