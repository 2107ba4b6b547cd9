"""What the rest of the program asks of an engine without importing it: its settings, its needs, how it is made.

Owns: `EngineDescriptor`, the base class of every engine's description, and what it is asked with. Refuses: torch, and
everything an engine does (port.py). The controller asks a descriptor when it judges a configuration, the worker when it
makes the engine. No other package compares `rollout.engine.kind` with a name.
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
    """What an engine may know of the run that uses it when it judges settings."""

    settings: EngineSettings
    num_workers: int
    interruption: Interruption
    """What a new version does to running answers."""
    model_dtype: DType
    startup_timeout_s: float
    """Of a worker, and of a server that it starts."""
    is_colocated: bool
    """Engines and trainer share devices in turns."""

    @property
    def dtype(self) -> DType:
        """Compute dtype of the engine."""
        return self.settings.dtype or self.model_dtype


@dataclass(frozen=True)
class EngineContext:
    """What an engine is made from, in the process of its worker."""

    worker: str
    """Name of the worker, such as `rollout-3`."""
    index: int
    """Number of the worker."""
    model_dir: Path
    """Folder of the starting model, in the form of Hugging Face; weights come with the first version."""
    settings: EngineSettings
    """`device` is this worker's own."""
    dtype: DType
    """Compute dtype."""
    num_threads: int
    seed: int
    """The run's seed."""
    interruption: Interruption
    """The one with which `load_version` will be called."""
    max_new_tokens: int
    starts_empty: bool
    """The device is shared in turns: take memory with the first version, not before."""
    startup_timeout_s: float
    log_dir: Path
    emulation: EmulationSettings | None
    tracer: Tracer
    report: Callable[[str], None]
    """Receives, in a sentence each, what broke inside the engine and was recovered there."""


@dataclass(frozen=True)
class EngineEnvironment:
    """A Python environment of an engine's own, in which nothing of ours is imported."""

    python: str
    """Default of `rollout.engine.python`."""
    package: str
    """Distribution that must be installed there."""
    build: str
    """Command that builds it on a machine without a GPU."""


@dataclass(frozen=True)
class ServingDemand:
    """What an engine holds of a model. Bytes of the whole model, whatever the number of its devices.

    device_bytes: memory of one device; None: not known.
    """

    weights_bytes: float
    cache_token_bytes: float
    """Keys and values of one token."""
    device_bytes: float | None = None


@dataclass(frozen=True)
class EngineMemory:
    """What one of a worker's devices holds, by the name of the part. needed_bytes: with less it cannot work; where
    it is smaller than the sum, the rest is a cache as large as it is allowed to be. words: what follows, for people."""

    parts: Mapping[str, float]
    needed_bytes: float
    words: str = ""


class EngineDescriptor:
    """One engine, for everything but generating. Subclass it, override what differs, and register an instance
    (registry.py) or name it in `rollout.engine.kind` by import path. Its module imports no torch.

    Example:
        >>> class Echo(EngineDescriptor):
        ...     name = title = "echo"
        ...     factory = "my_engine.engine:make"
        >>> Echo().devices_per_worker(EngineSettings())
        1
    """

    name: str
    """Value of `rollout.engine.kind`, where it is registered."""
    title: str
    """In messages."""
    factory: str
    """`module:function`, imported by the worker only and called with an EngineContext; returns the Engine."""
    section: str = ""
    """Its section of `rollout.engine`; empty: it is configured by `rollout.engine.options`, or not at all."""
    environment: EngineEnvironment | None = None
    """None: it runs in ours."""
    interruptions: tuple[Interruption, ...] = ("recompute", "keep_kv", "drain")
    """Values of `rollout.interruption` that it can do."""
    joins_process_groups: bool = False
    """It can receive weights by a process group (`Engine.load_from_group`)."""
    releases_memory: bool = False
    """It can give its memory to the trainer between steps (`Engine.release_memory`)."""
    can_be_emulated: bool = False
    """Emulated devices can stand in for it."""

    def devices_per_worker(self, settings: EngineSettings) -> int:
        """GPUs (on a CPU: processes) of one worker."""
        return 1

    def settings_for_devices(self, devices: int) -> dict[str, str] | None:
        """Settings, as `key: value`, with which a worker has so many devices; None where it cannot."""
        return {} if devices == 1 else None

    def interpreter(self, settings: EngineSettings) -> str | None:
        """The interpreter it needs on the worker's machine besides ours, as configured; None: none."""
        return None if self.environment is None else settings.python or self.environment.python

    def server_ports(self, job: EngineJob) -> tuple[str, Sequence[int]]:
        """The setting that fixes ports on the workers' machine, and these; no ports: any free ones."""
        return "", ()

    def stop_string_problem(self, settings: EngineSettings) -> str:
        """Why it cannot end an answer with the token that completes a text of `sampling.stop`
        (`GenerationRequest.stops`); empty: it can."""
        return f"{self.title} does not look for texts"

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """What is wrong with `rollout.engine.options`. Here: that there are any."""
        if options:
            what = f"{self.title} has no options (here: {', '.join(options)})"
            yield SettingProblem(
                (OPTIONS_KEY, KIND_KEY), what, f"rollout.engine.{self.section}" if self.section else "{}"
            )

    def setting_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Settings that contradict each other. Pure."""
        yield from ()

    def model_problems(self, job: EngineJob, model: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """What a model's config.json (or `model.init`) has against the settings. Pure."""
        yield from ()

    def environment_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """What this machine lacks. May look at files and start short processes."""
        yield from ()

    def group_problems(self, job: EngineJob, model: Mapping[str, Any] | None) -> Iterator[SettingProblem]:
        """Why weights cannot reach it by a process group; the keys are its own. `model`: where known. Pure."""
        if not self.joins_process_groups:
            yield SettingProblem((KIND_KEY,), f"{self.title} cannot join a process group")

    def colocation_problems(self, job: EngineJob) -> Iterator[SettingProblem]:
        """Why it cannot share its devices with the trainer. Pure."""
        if not self.releases_memory:
            yield SettingProblem(
                ("placement", KIND_KEY), f"{self.title} cannot release its memory", "placement: disaggregated"
            )

    def memory(self, job: EngineJob, demand: ServingDemand) -> EngineMemory:
        """What one device of a worker holds. Here: one copy of the weights, and a cache for every slot."""
        engine = job.settings
        cache = demand.cache_token_bytes * engine.num_slots * engine.max_context
        devices = self.devices_per_worker(engine)
        parts = {"weights": demand.weights_bytes / devices, "KV cache": cache / devices}
        return EngineMemory(parts, sum(parts.values()))

    def memory_settings(self, job: EngineJob) -> Iterator[tuple[str, EngineSettings]]:
        """Smaller settings that need less memory, the smallest change first, each with its words. Here: fewer slots."""
        slots = job.settings.num_slots // 2
        while slots:
            yield f"rollout.engine.num_slots: {slots}", job.settings.model_copy(update={"num_slots": slots})
            slots //= 2

    def rounding_key(self, settings: EngineSettings) -> str:
        """The setting by which it computes with fewer bits than the trainer, so that its log-probs are those of another
        policy and need the correction weight; empty: none.
        """
        return ""

    def recoveries(self, job: EngineJob) -> Iterator[Recovery]:
        """Each way in which it may stand still and then go on by itself."""
        yield from ()

    def advice(self, job: EngineJob) -> Iterator[str]:
        """Settings that work but waste something."""
        yield from ()
