"""Cross-checks of declared models (`rollout.models`). Pure, like run.py.

Model folders are checked in controller/preflight/called_models.py, the list of models that a workflow calls in
rollout/check_workflow.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from areal_like.device_names import is_device
from areal_like.import_path import is_import_path
from areal_like.token_source import MAX_NAME_CHARS
from controller.config.problems import Problem
from controller.config.run_config import CalledModelSettings, RunConfig

KEY = "rollout.models"
NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}")
RESERVED = "policy"
OWN_WEIGHTS_KEYS = ("num_slots", "max_context", "device", "dtype")
"""Keys that have no effect on a role of the policy."""


def called_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions in `rollout.models`, and between it and the rest of the run."""
    models = config.rollout.models
    if not models:
        return
    is_called = any(model.name != config.trainer.teacher_model for model in models)
    if is_called and not is_import_path(config.rollout.workflow):
        what = f"the workflow `{config.rollout.workflow}` does not call models"
        yield Problem((KEY, "rollout.workflow"), what, "use your own workflow (module:Class), or remove rollout.models")
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            yield Problem((KEY,), f"{count} models have the name `{name}`", "give each model a different name")
    for index, model in enumerate(models):
        yield from _model_problems(config, f"{KEY}.{index}", model)
    roles = [model for model in models if model.is_role]
    if roles and not any(model.is_trained for model in roles):
        what = (
            f"the policy is called in the roles {', '.join(one.name for one in roles)}, but none of these roles is "
            "trained"
        )
        yield Problem((KEY,), what, "set trained: true for at least one role")


def _model_problems(config: RunConfig, key: str, model: CalledModelSettings) -> Iterator[Problem]:
    if not NAME.fullmatch(model.name) or model.name == RESERVED:
        what = f"`{model.name}` cannot be the name of a model"
        remedy = f"use lower-case letters, digits and _, beginning with a letter; not `{RESERVED}`"
        yield Problem((f"{key}.name",), what, remedy)
    if model.endpoint is not None:
        yield from _endpoint_problems(key, model)
        return
    yield from _adapter_problems(key, model)
    if (model.source is None) == (model.path is None) and (model.adapter is None or model.path is not None):
        what = "neither source nor path is given" if model.path is None else "source and path are mutually exclusive"
        remedy = "set path to a model folder, set source to start or policy, or set endpoint"
        yield Problem((f"{key}.path", f"{key}.source", key), what, remedy)
        return
    if model.path == "":
        yield Problem((f"{key}.path",), "the value is empty", "specify a Hugging Face model folder")
    if model.refresh_every is not None and model.source != "policy":
        what = "only a copy of the policy can be refreshed"
        yield Problem((f"{key}.refresh_every", f"{key}.source"), what, "set source: policy, or remove refresh_every")
    elif model.has_weights:
        yield from _weights_problems(config, key, model)
    else:
        yield from _role_problems(config, key, model)


def _endpoint_problems(key: str, model: CalledModelSettings) -> Iterator[Problem]:
    """Problems of an external model, which has nothing in the worker."""
    for name in ("source", "path", "adapter", "refresh_every", *OWN_WEIGHTS_KEYS):
        if getattr(model, name) is not None:
            what = "this key has no effect on a model behind an endpoint"
            yield Problem((f"{key}.{name}", f"{key}.endpoint"), what, f"remove this key, or {key}.endpoint")
    if model.trained:
        what = "a model behind an endpoint cannot be trained"
        yield Problem((f"{key}.trained", f"{key}.endpoint"), what, "set trained: false")


def _adapter_problems(key: str, model: CalledModelSettings) -> Iterator[Problem]:
    if model.adapter is None:
        return
    if model.adapter == "":
        yield Problem((f"{key}.adapter",), "the value is empty", "specify the folder of an adapter in peft's format")
    if model.source == "policy":
        what = "an adapter requires a frozen base model, but the policy changes during training"
        yield Problem((f"{key}.adapter", f"{key}.source"), what, "set source: start or a path, or remove the adapter")


def _weights_problems(config: RunConfig, key: str, model: CalledModelSettings) -> Iterator[Problem]:
    if model.trained:
        yield Problem(
            (f"{key}.trained",),
            f"{model.words} cannot be trained, because a run trains only one policy",
            "set trained: false, or use a role of the policy (source: policy without refresh_every); to train two "
            "models, start two runs",
        )
    if model.device is not None and not is_device(model.device):
        yield Problem((f"{key}.device",), f"there is no device `{model.device}`", "use cpu, cuda or cuda:N")
    if config.emulation is not None:
        yield Problem(
            (key, "emulation"), "emulated devices cannot run a model with separate weights", "set emulation: null"
        )
    if config.is_colocated:
        what = "a model with separate weights does not release its memory while the trainer uses the devices"
        yield Problem((key, "placement"), what, "set placement: disaggregated")
    transfer = config.trainer.weights.transfer
    if model.refresh_every is not None and transfer.needs_process_group:
        what = f"a refreshed copy is loaded from files, but `{transfer.name}` transfers versions without files"
        keys = (f"{key}.refresh_every", "trainer.weights.kind")
        yield Problem(keys, what, "set trainer.weights.kind to shm or stream")


def _role_problems(config: RunConfig, key: str, model: CalledModelSettings) -> Iterator[Problem]:
    for name in OWN_WEIGHTS_KEYS:
        if getattr(model, name) is not None:
            yield Problem(
                (f"{key}.{name}",),
                "this key has no effect on a role of the policy",
                f"set rollout.engine.{name} instead",
            )
    if model.is_trained and model.temperature not in (None, config.sampling.temperature):
        yield Problem(
            (f"{key}.temperature", "sampling.temperature"),
            f"tokens sampled at temperature {model.temperature:g} cannot be used for training at temperature "
            f"{config.sampling.temperature:g}",
            "remove this key, or set trained: false",
        )
