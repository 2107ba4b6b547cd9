"""The recorded spec of a run's trainer, changed for a replay, and what a capsule needs of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pydantic

from areal_like.config import ProcessSpec, TraceSettings
from areal_like.device_names import names_cpu
from areal_like.errors import UserError
from rollout.config import SINGLE_TURN, RolloutSettings
from rollout.engine.registry import ENGINES
from trainer.backends.registry import find_backend
from trainer.config import TrainerSettings
from trainer.objectives.registry import needs_reference
from trainer.replay.spec import ReplaySpec as ReplaySpec

REPLAY, REGENERATE = "trainer.replay", "rollout.regenerate"
"""`python -m` names of the processes that replay steps, and that draw recorded answers again."""


class EngineFacts(NamedTuple):
    """What a comparison needs to know of the engine that sampled a run's answers.

    title: its name in messages. can_redraw: its tokens can be drawn again. is_exact: it computed in float32 on a CPU.
    keeps_kv: answers continued with keys and values of earlier versions. has_one_answer: a sample is one answer, which
    ends by the sampling settings alone.
    """

    title: str
    can_redraw: bool
    is_exact: bool
    keeps_kv: bool
    has_one_answer: bool


def engine_facts(worker: ProcessSpec) -> EngineFacts:
    """Facts of the engine in a worker's spec. Raises UserError if log-probs cannot be computed as it computed them."""
    try:
        settings = RolloutSettings.model_validate(worker.settings)
    except pydantic.ValidationError as error:
        raise _other_version("rollout", error) from error
    engine, found = settings.engine, ENGINES.get(settings.engine.kind)
    if found is not None and (key := found.rounding_key(engine)):
        raise UserError(
            "the engine of the run quantised its weights or KV cache, so its log-probs cannot be recomputed",
            where=key, remedy="specify a run without quantisation",
        )  # fmt: skip
    dtypes = {worker.model.dtype, engine.dtype or worker.model.dtype}
    return EngineFacts(
        title=engine.kind if found is None else found.title,
        can_redraw=found is not None and found.can_redraw,
        is_exact=dtypes == {"float32"} and names_cpu(engine.device),
        keeps_kv=worker.mode != "one_step_off" and settings.interruption == "keep_kv",
        has_one_answer=settings.workflow == SINGLE_TURN and worker.sampling.forced_lengths is None,
    )


def settings_of(spec: ProcessSpec) -> TrainerSettings:
    """The trainer's settings. Raises UserError if this version does not accept them."""
    try:
        return TrainerSettings.model_validate(spec.settings)
    except pydantic.ValidationError as error:
        raise _other_version("trainer", error) from error


def _other_version(section: str, error: pydantic.ValidationError) -> UserError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in (section, *first["loc"]))
    return UserError(first["msg"], where=key, remedy="use the version of areal_like that created the run")


def in_scratch(spec: ProcessSpec, scratch: Path, resume_from: Path | None, address: str) -> ProcessSpec:
    """The spec of one start of a trainer, of which nothing reaches the run: it writes to `scratch` and has no hub.

    Devices are not shared with engines. address: where its ranks meet.
    """
    return spec.model_copy(
        update={
            "run_dir": str(scratch),
            "weight_dir": str(scratch / "weights"),
            "hub_address": "",
            "curve_dir": "",
            "parent_pid": os.getpid(),
            "resume_from": str(resume_from) if resume_from else None,
            "is_colocated": False,
            "is_device_taken": False,
            "ranks_address": address,
            "has_own_gpus": False,
            "trace": TraceSettings(),
        }
    )


def recalls_versions(spec: ProcessSpec) -> bool:
    """Whether its steps need weights of earlier versions."""
    return settings_of(spec).version_logprobs is not None


def fixed_models(spec: ProcessSpec) -> dict[str, Path]:
    """Folders of models that its steps read and never change, by role: `model`, the starting model as the reference or
    the base of an adapter, and `teacher`.
    """
    settings, found = settings_of(spec), {}
    if settings.lora is not None or needs_reference(settings.loss, settings.advantage):
        found["model"] = Path(str(spec.model.path))
    if settings.teacher is not None and settings.teacher.path is not None:  # log-probs of a model come with the samples
        found["teacher"] = Path(settings.teacher.path)
    return found


def capsule_problem(spec: ProcessSpec) -> tuple[str, str] | None:
    """Why a capsule of one of its steps cannot be made, as key and reason; None if it can."""
    settings = settings_of(spec)
    if spec.num_ranks > 1:
        return (
            "trainer.ranks",
            f"a capsule contains a step of a single rank, but this trainer has {spec.num_ranks} ranks",
        )
    if settings.version_logprobs is not None:
        return (
            "trainer.version_logprobs",
            "this setting needs weights of earlier versions, which a capsule does not contain",
        )
    if not find_backend(settings.backend).gives_gradients:
        return "trainer.backend", f"the backend {settings.backend} does not provide gradients, which a capsule compares"
    return None
