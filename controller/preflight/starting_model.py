"""Checks of the starting model and its tokenizer from their files: whether they exist, and fit the config.

Headers and folders are read in controller/config/model_folder.py; memory is checked in memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.config import ModelSettings
from areal_like.context_limit import context_limit
from areal_like.errors import UserError
from controller.config import model_folder
from controller.config.engines import group_problems, model_problems
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.lora import target_problems
from controller.config.validation.trainer_backend import head_problems
from controller.preflight import model_init
from controller.preflight.found import Preflight, as_problem


def problems_of(model: ModelSettings) -> tuple[list[Problem], dict[str, Any] | None, bool]:
    """Problems of a starting model and its tokenizer, its config.json if it could be read, and whether it is on this
    machine.
    """
    if model.path is None:
        problems, tokenizer = list(model_init.problems_of(model.init or {})), model.tokenizer
        if tokenizer not in ("bytes", "from_model") and ":" not in tokenizer:
            problems += _faults_of_tokenizer(tokenizer)
        return problems, None, True
    errors, config, is_here = model_folder.problems_of(model.path, model.tokenizer)
    return [as_problem("model.path", error) for error in errors], config, is_here


def look_at_model(config: RunConfig, found: Preflight) -> None:
    """Add to `found` what is wrong with it, and its config."""
    path = config.model.path
    errors, found.model, is_here = problems_of(config.model)
    found.problems += errors
    if path is None:
        if not errors:
            found.problems += [*target_problems(config, {}), *head_problems(config, config.model.init or {})]
        return
    if not is_here:
        found.notes.append(
            f"model.path: {path} is not on this machine and will be downloaded from the Hugging Face Hub"
        )
    if not errors and (config.trainer.lora is not None or config.warm_start is not None):
        found.problems += target_problems(config, model_folder.tensor_shapes(path))
    if found.model:
        found.problems += model_problems(config, found.model)
        found.problems += head_problems(config, found.model)
        if config.trainer.weights.transfer.needs_process_group:
            found.problems += group_problems(config, found.model)
    limit = context_limit(found.model or {})
    if limit is not None and (excess := limit.excess(config.rollout.engine.max_context)):
        found.problems.append(Problem(("rollout.engine.max_context",), excess, limit.remedy))


def _faults_of_tokenizer(name: str) -> Iterator[Problem]:
    try:
        model_folder.check_tokenizer(Path(name).expanduser())
    except UserError as error:
        yield as_problem("model.tokenizer", error)
