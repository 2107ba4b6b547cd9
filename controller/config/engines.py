"""Access to the descriptor of the run's engine (rollout/engine/*/descriptor.py).

Prepares the descriptor's input and converts the problems that it reports to problems of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from areal_like.config import ProcessSpec
from areal_like.errors import UserError
from areal_like.setting_problem import SettingProblem
from controller.config.problems import Problem
from controller.config.run_settings import RunSettings
from rollout.config import EngineSettings, RolloutSettings
from rollout.engine.adapter_layout import fused_parameters as fused_parameters
from rollout.engine.adapter_layout import product_widths as product_widths
from rollout.engine.descriptor import KIND_KEY, EngineDescriptor, EngineJob
from rollout.engine.descriptor import ServingDemand as ServingDemand
from rollout.engine.registry import ENGINES, find_engine

REGISTERED = ENGINES
"""Engines that come with this program, by `rollout.engine.kind`."""


def section_keys(section: str) -> frozenset[str]:
    """Keys of an engine's section of `rollout.engine`, such as `vllm`."""
    return frozenset(type(getattr(EngineSettings(), section)).model_fields)


def configured_engine(config: RunSettings) -> EngineDescriptor:
    """The engine of `rollout.engine.kind`. Raises UserError if there is none."""
    return find_engine(config.rollout.engine.kind)


def engine_of(config: RunSettings) -> EngineDescriptor:
    """The engine that the workers use. With emulated devices it differs from the configured one. Raises UserError."""
    return find_engine(config.rollout.engine.kind, is_emulated=config.emulation is not None)


def written_devices_per_worker(section: Any) -> int:
    """Devices of one worker by the unvalidated `rollout.engine`; 1 if that is invalid, which is reported later."""
    try:
        settings = EngineSettings.model_validate(section)
        return find_engine(settings.kind).devices_per_worker(settings)
    except (ValidationError, UserError):
        return 1


def engine_kind_problems(config: RunSettings) -> Iterator[Problem]:
    """Problem of an unknown engine. All other checks of a configuration depend on the engine."""
    try:
        configured_engine(config)
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)


def engine_job(config: RunSettings) -> EngineJob:
    """What an engine's descriptor may read of the run."""
    return EngineJob(
        settings=config.rollout.engine,
        num_workers=config.rollout.num_workers,
        interruption="drain" if config.mode == "one_step_off" else config.rollout.interruption,
        model_dtype=config.model.dtype,
        startup_timeout_s=config.launch.startup_timeout_s,
        is_colocated=config.is_colocated,
    )


def worker_problems(spec: ProcessSpec) -> Iterator[SettingProblem]:
    """Requirements of a rollout worker's engine that this machine does not meet, by the worker's spec."""
    settings = RolloutSettings.model_validate(spec.settings)
    job = EngineJob(
        settings=settings.engine,
        num_workers=1,
        interruption=settings.interruption,
        model_dtype=spec.model.dtype,
        startup_timeout_s=spec.startup_timeout_s,
        is_colocated=spec.is_colocated,
    )
    yield from _engine_of_spec(spec).environment_problems(job)


def reads_weights(spec: ProcessSpec) -> bool:
    """Return whether a rollout worker reads the weights in the model's folder, not only its config and tokenizer."""
    return spec.merges_adapters or _engine_of_spec(spec).starts_with_weights


def _engine_of_spec(spec: ProcessSpec) -> EngineDescriptor:
    return find_engine(spec.settings["engine"]["kind"], is_emulated=spec.emulation is not None)


def as_problems(found: Iterable[SettingProblem]) -> Iterator[Problem]:
    """Convert problems found by an implementation to problems of the configuration."""
    for problem in found:
        yield Problem(problem.keys, problem.what, problem.remedy)


def model_problems(config: RunSettings, model: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the engine with a model's config.json (or `model.init`)."""
    engine, job = configured_engine(config), engine_job(config)
    yield from as_problems(engine.model_problems(job, model))


def group_problems(config: RunSettings, model: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Reasons why the engine cannot receive weights by a process group. `model`: its config, if known."""
    for problem in configured_engine(config).group_problems(engine_job(config), model):
        yield Problem(("trainer.weights.kind", *problem.keys), problem.what, "set kind: stream")
