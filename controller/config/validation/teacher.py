"""Cross-checks of `trainer.teacher`. Pure, like run.py.

That an advantage has the teacher that it needs is checked in objectives.py, the folders of models in
controller/preflight/called_models.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.problems import Problem, nearest
from controller.config.run_config import RunConfig

KEY, MODELS = "trainer.teacher", "rollout.models"


def teacher_problems(config: RunConfig) -> Iterator[Problem]:
    """Contradictions in `trainer.teacher`, and between it and the declared models."""
    teacher = config.trainer.teacher
    if teacher is None:
        return
    if (teacher.path is None) == (teacher.model is None):
        what = "neither path nor model is given" if teacher.path is None else "path and model are mutually exclusive"
        remedy = (
            "set path to a model folder for a teacher on the trainer's ranks, or set model to the name of an entry of "
            f"{MODELS}"
        )
        yield Problem((KEY, f"{KEY}.path", f"{KEY}.model"), what, remedy)
    elif teacher.model is not None:
        yield from _model_problems(config, teacher.model)


def _endpoint_problems(config: RunConfig, key: str, name: str) -> Iterator[Problem]:
    """Problems of a teacher behind an endpoint; that it returns log-probs is checked when a worker starts."""
    endpoint = next(one.endpoint for one in config.rollout.models if one.name == name)
    assert endpoint is not None
    if endpoint.api != "tokens":
        what = f"the teacher `{name}` must return log-probs of given tokens, which chat completions do not"
        yield Problem((f"{key}.api", KEY), what, "set api: tokens, and use a server that supports it, such as vLLM")
    if config.sampling.temperature != 1.0:
        heat = config.sampling.temperature
        what = f"the endpoint of `{name}` returns log-probs at temperature 1, but samples are drawn at {heat:g}"
        remedy = "set sampling.temperature: 1, or use a teacher with weights (path)"
        yield Problem((key, "sampling.temperature"), what, remedy)


def _model_problems(config: RunConfig, name: str) -> Iterator[Problem]:
    key, models = f"{KEY}.model", config.rollout.models
    place = next((place for place, model in enumerate(models) if model.name == name), None)
    if place is None:
        near = nearest(name, [model.name for model in models])
        remedy = f"did you mean {near[0]}?" if near else f"declare it with {MODELS}: [{{name: {name}, path: FOLDER}}]"
        yield Problem((key, MODELS), f"there is no model `{name}` in {MODELS}", remedy)
        return
    model, longest = models[place], config.rollout.engine.max_context
    if model.endpoint is not None:
        yield from _endpoint_problems(config, f"{MODELS}.{place}.endpoint", name)
    elif not model.has_weights:
        what = f"`{name}` is a role of the policy, which has no separate weights"
        yield Problem(
            (key, f"{MODELS}.{place}"), what, "declare the model with a path, with source: start, or with refresh_every"
        )
    elif model.max_context is not None and model.max_context < longest:
        what = f"the teacher `{name}` accepts up to {model.max_context} tokens, but samples may have {longest} tokens"
        keys = (f"{MODELS}.{place}.max_context", "rollout.engine.max_context")
        yield Problem(keys, what, "remove max_context, or reduce rollout.engine.max_context")
