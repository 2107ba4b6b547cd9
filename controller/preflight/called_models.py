"""Checks of the declared models (`rollout.models`) and of a teacher (`trainer.teacher`) from their files: whether they
exist, and have the policy's tokenizer, and whether adapters fit their bases.

Combinations of settings are checked in controller/config/validation/models.py. Rollout workers compare models without a
tokenizer.json once more when they load them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.config import BUILT_IN_TOKENIZERS
from areal_like.context_limit import context_limit
from areal_like.errors import UserError
from areal_like.external.needs import endpoint_needs, silent
from areal_like.weights.adapter_folder import base_problem, read_adapter
from controller.config import model_folder
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.lora import made_weights
from controller.preflight.found import as_problem

KEY, TEACHER_KEY = "rollout.models", "trainer.teacher"


def problems_of(config: RunConfig, policy: dict[str, Any] | None) -> Iterator[Problem]:
    """Problems of the model folders. policy: config.json of the policy, if it is on this machine."""
    for index, model in enumerate(config.rollout.models):
        if model.has_weights:
            context = model.max_context or config.rollout.engine.max_context
            yield from _folder_problems(f"{KEY}.{index}", model.path, context, policy)
        if model.endpoint is not None:
            yield from (
                Problem((f"{KEY}.{index}.endpoint.{error.where}",), error.what, error.remedy)
                for error in endpoint_needs(model.endpoint)
            )
        if model.adapter:
            yield from adapter_problems(config, f"{KEY}.{index}.adapter", model.path, Path(model.adapter))
    if (teacher := config.trainer.teacher) is not None and teacher.path is not None:
        yield from _folder_problems(TEACHER_KEY, teacher.path, config.rollout.engine.max_context, policy)
    yield from tokenizer_problems(config, _policy_tokenizer(config))


def silent_endpoints(config: RunConfig) -> Iterator[Problem]:
    """Endpoints of external models at which nothing listens now."""
    for index, model in enumerate(config.rollout.models):
        endpoint = model.endpoint
        if endpoint is None or endpoint.record == "replay":
            continue
        key = f"{KEY}.{index}.endpoint.base_url"
        if (error := silent(endpoint.base_url, key)) is not None:
            yield as_problem(key, error)


def _folder_problems(key: str, path: str | None, context: int, policy: dict[str, Any] | None) -> Iterator[Problem]:
    own = policy
    if path is not None:
        errors, own, is_here = model_folder.problems_of(path, "from_model")
        yield from (as_problem(f"{key}.path", error) for error in errors)
        if not is_here:
            yield Problem(
                (f"{key}.path",), f"{path} is not on this machine", "download the model, and specify its folder"
            )
    limit = context_limit(own or {})
    if limit is not None and (excess := limit.excess(context)):
        if key == TEACHER_KEY:
            yield Problem(("rollout.engine.max_context", f"{key}.path"), f"teacher: {excess}", limit.remedy)
        else:
            yield Problem((f"{key}.max_context",), excess, limit.remedy.replace("rollout.engine", key))


def adapter_problems(config: RunConfig, key: str, path: str | None, folder: Path) -> Iterator[Problem]:
    """Problems of an adapter. path: folder of its base; None: the run's starting model. Shapes are compared where the
    base's files are on this machine."""
    base = config.model.path if path is None else path
    weights = made_weights(config.model.init or {}) if base is None else model_folder.tensor_shapes(base)
    try:
        adapter = read_adapter(folder.expanduser())
        problem = base_problem(adapter, weights) if weights else None
    except UserError as error:
        problem = error
    if problem is not None:
        yield as_problem(key, problem)


def tokenizer_problems(config: RunConfig, policy: Path | None) -> Iterator[Problem]:
    """Problems of models with a different tokenizer, or a vocabulary too small for it. policy: folder of the policy's
    tokenizer.
    """
    ours = vocabulary_of(policy)
    paths = {f"{KEY}.{index}.path": model.path for index, model in enumerate(config.rollout.models)}
    paths[f"{TEACHER_KEY}.path"] = None if config.trainer.teacher is None else config.trainer.teacher.path
    for name, path in paths.items():
        if path is None or ours is None:
            continue
        folder = Path(path).expanduser()
        theirs, size = vocabulary_of(folder), _vocab_size(folder)
        key = (name,)
        if theirs is not None and ours != theirs:
            text, number = min(set(ours.items()) ^ set(theirs.items()), key=lambda entry: (entry[1], entry[0]))
            what = f"the tokenizer of {path} differs from the policy's at token {number} ({text!r})"
            yield Problem(key, what, "use a model with the policy's tokenizer, because the models exchange token ids")
        elif size is not None and size <= (largest := max(ours.values(), default=0)):
            has = f"the policy's tokenizer has a token with the id {largest}"
            what = f"{path} has a vocabulary of {size} tokens, but {has}"
            yield Problem(key, what, "use a model that was trained with the policy's tokenizer")


def check_tokenizers(config: RunConfig, model_dir: Path) -> None:
    """Repeat the check when the starting model is prepared, for tokenizers that are built in code. Raises UserError."""
    for problem in tokenizer_problems(config, model_dir):
        raise UserError(problem.what, where=problem.keys[0], remedy=problem.remedy)


def vocabulary_of(folder: Path | None) -> dict[str, int] | None:
    """Token numbers by their text, including added tokens, from tokenizer.json; None if it cannot be read."""
    if folder is None:
        return None
    try:
        found = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        vocab = found["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((one[0], place) for place, one in enumerate(vocab))
        tokens = {str(text): int(number) for text, number in pairs}
        return tokens | {str(one["content"]): int(one["id"]) for one in found.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _vocab_size(folder: Path) -> int | None:
    try:
        found = model_folder.read_model_config(folder)
    except UserError:
        return None
    text = found.get("text_config")
    size = found.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _policy_tokenizer(config: RunConfig) -> Path | None:
    """Folder of the policy's tokenizer, if it exists before the preparation."""
    name = config.model.tokenizer
    place = config.model.path if name == "from_model" else None if name in BUILT_IN_TOKENIZERS else name
    try:
        return model_folder.find_model(place) if place is not None else None
    except UserError:  # reported by the checks of the model
        return None
