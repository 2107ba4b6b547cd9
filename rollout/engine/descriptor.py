"""The descriptor of an engine: its settings, requirements and factory, for code that must not import the engine.

The controller uses a descriptor to validate a configuration, the worker to create the engine. Descriptors do not import
torch. No other package compares `rollout.engine.kind` with a name. The engine itself implements port.py. The controller
asks a descriptor when it judges a configuration, the worker when it makes the engine. No other package compares
`rollout.engine.kind` with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.emulation.settings import EmulationSettings
from areal_like.setting_problem import Recovery, SettingProblem
from areal_like.settings import DType
from areal_like.trace import Tracer
from rollout.config import EngineSettings
from rollout.engine.port import Interruption

KIND_KEY = "rollout.engine.kind"
OPTIONS_KEY = "rollout.engine.options"
PYTHON_KEY = "rollout.engine.python"


@dataclass(frozen=True)
class EngineJob:
    """The facts about a run that a descriptor uses to validate settings."""

    settings: EngineSettings
    num_workers: int
    interruption: Interruption
    """Handling of running answers when a new version is swapped in."""
    model_dtype: DType
    startup_timeout_s: float
    """Longest start of a worker, and of a server that it starts."""
    is_colocated: bool
    """Engines and trainer share devices in turns."""

    @property
    def dtype(self) -> DType:
        """Compute dtype of the engine."""
        return self.settings.dtype or self.model_dtype


@dataclass(frozen=True)
class EngineContext:
    """The arguments with which an engine is created, in the process of its worker."""

    worker: str
    """Name of the worker, such as `rollout-3`."""
    index: int
    """Number of the worker."""
    model_dir: Path
    """Hugging Face folder of the starting model; weights come with the first version."""
    settings: EngineSettings
    """Settings; `device` is the device of this worker."""
    dtype: DType
    """Compute dtype."""
    num_threads: int
    seed: int
    """The run's seed."""
    interruption: Interruption
    """The mode with which `load_version` will be called."""
    max_new_tokens: int
    starts_empty: bool
    """The device is shared in turns: allocate memory with the first version, not before."""
    startup_timeout_s: float
    log_dir: Path
    emulation: EmulationSettings | None
    tracer: Tracer
    report: Callable[[str], None]
    """Called with a sentence for each failure inside the engine from which it recovered."""


@dataclass(frozen=True)
class EngineEnvironment:
    """A separate Python environment of an engine, in which our packages are not imported."""

    python: str
    """Default of `rollout.engine.python`."""
    package: str
    """Distribution that must be installed there."""
    build: str
    """Command that creates it on a machine without a GPU."""


@dataclass(frozen=True)
class ServingDemand:
    """Memory that an engine needs for a model, in bytes for the whole model, whatever the number of devices.

    device_bytes: memory of one device; None: unknown.
    """

    weights_bytes: float
    cache_token_bytes: float
    """Bytes of keys and values of one token."""
    device_bytes: float | None = None


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one of a worker's devices, by name of the part. needed_bytes: the required minimum; if it is smaller
    than the sum, the rest is a cache that uses the allowed memory. words: explanation for the user."""

    parts: Mapping[str, float]
    needed_bytes: float
    words: str = ""


class EngineDescriptor:
    """Describes one engine. Subclass it, override what differs, and register an instance (registry.py) or name it in
    `rollout.engine.kind` by import path. Its module must not import torch.

    Example:
        >>> class Echo(EngineDescriptor):
        ...     name = title = "echo"
        ...     factory = "my_engine.engine:make"
        >>> Echo().devices_per_worker(EngineSettings())
        1
    """

    name: str
    """Value of `rollout.engine.kind`, if it is registered."""
    title: str
    """Name in messages."""
    factory: str
    """`module:function`, imported by the worker only and called with an EngineContext; returns the Engine."""
    section: str = ""
    """Its section of `rollout.engine`; empty: it is configured by `rollout.engine.options`, or not at all."""
    environment: EngineEnvironment | None = None
    """Its separate environment; None: it runs in ours."""
    interruptions: tuple[Interruption, ...] = ("recompute", "keep_kv", "drain")
    """Supported values of `rollout.interruption`."""
    joins_process_groups: bool = False
    """It can receive weights through a process group (`Engine.load_from_group`)."""
    releases_memory: bool = False
    """It can release its memory to the trainer between steps (`Engine.release_memory`)."""
    starts_with_weights: bool = False
    """It reads the weights in the model's folder when it starts; otherwise only config and tokenizer are read there."""
    can_be_emulated: bool = False
    """It can be replaced by emulated devices."""
    can_redraw: bool = False
    """It draws tokens with rollout/engine/sampler.py, so `areal-like replay --engine` can draw them again."""

    def devices_per_worker(self, settings: EngineSettings) -> int:
        """Number of GPUs (on a CPU: processes) of one worker."""
        return 1

    def settings_for_devices(self, devices: int) -> dict[str, str] | None:
        """Settings, as `key: value`, with which a worker has `devices` devices; None if that is not possible."""
        return {} if devices == 1 else None

    def interpreter(self, settings: EngineSettings) -> str | None:
        """The configured interpreter that it needs on the worker's machine in addition to ours; None: none."""
        return None if self.environment is None else settings.python or self.environment.python

    def server_ports(self, job: EngineJob) -> tuple[str, Sequence[int]]:
        """The setting that fixes ports on the workers' machine, and these ports; no ports: any free ones."""
        return "", ()

    def stop_string_problem(self, settings: EngineSettings) -> str:
        """Why it cannot end an answer with the token that completes a text of `sampling.stop`
        (`GenerationRequest.stops`); empty: it can."""
        return f"{self.title} cannot search for stop strings"

    def records_routes(self, settings: EngineSettings) -> bool:
        """True if its answers have the experts that each token was routed to (`Answer.routed_experts`)."""
        return False

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Problems of `rollout.engine.options`. By default any option is one."""
        if options:
            what = f"{self.title} has no options, but these are set: {', '.join(options)}"
            yield SettingProblem(
                (OPTIONS_KEY, KIND_KEY),
                what,
                f"use the settings in rollout.engine.{self.section} instead"
                if self.section
                else "remove these options",
            )

    def setting_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Settings that contradict each other. A pure function."""
        yield from ()

    def model_problems(self, job: EngineJob, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Conflicts of a model's config.json (or `model.init`) with the settings. A pure function."""
        yield from ()

    def environment_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Requirements that this machine does not meet. It may read files and start short processes."""
        yield from ()

    def group_problems(self, job: EngineJob, model: Mapping[str, Any] | None) -> Iterator[SettingProblem]:
        """Reasons why it cannot receive weights through a process group, with its own keys. `model`: if known. A pure
        function."""
        if not self.joins_process_groups:
            yield SettingProblem((KIND_KEY,), f"{self.title} cannot join a process group")

    def colocation_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Reasons why it cannot share its devices with the trainer. A pure function."""
        if not self.releases_memory:
            yield SettingProblem(
                ("placement", KIND_KEY),
                f"placement: colocated requires an engine that can release its memory, but {self.title} cannot",
                "set placement: disaggregated",
            )

    def memory(self, job: EngineJob, demand: ServingDemand) -> EngineMemory:
        """Memory of one device of a worker. By default one copy of the weights, and a cache for every slot."""
        engine = job.settings
        cache = demand.cache_token_bytes * engine.num_slots * engine.max_context
        devices = self.devices_per_worker(engine)
        parts = {"weights": demand.weights_bytes / devices, "KV cache": cache / devices}
        return EngineMemory(parts, sum(parts.values()))

    def memory_settings(self, job: EngineJob) -> Iterator[tuple[str, EngineSettings]]:
        """Settings that need less memory, the smallest change first, each with a description. By default fewer
        slots.
        """
        slots = job.settings.num_slots // 2
        while slots:
            yield f"rollout.engine.num_slots: {slots}", job.settings.model_copy(update={"num_slots": slots})
            slots //= 2

    def rounding_key(self, settings: EngineSettings) -> str:
        """The setting that makes it compute with fewer bits than the trainer, so that its log-probs differ and need the
        correction weight; empty: none.
        """
        return ""

    def recoveries(self, job: EngineJob) -> Iterator[Recovery]:
        """Situations in which it may stall and then recover by itself."""
        yield from ()

    def advice(self, job: EngineJob) -> Iterator[str]:
        """Advice on settings that work but are inefficient."""
        yield from ()
