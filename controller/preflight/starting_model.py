"""Checks of the starting model and its tokenizer from their files: whether they exist, and fit the config.

Headers and folders are read in controller/config/model_folder.py; memory is checked in memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from areal_like.context_limit import context_limit
from areal_like.errors import UserError
from controller.config import model_folder
from controller.config.engines import group_problems, model_problems
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.lora import target_problems
from controller.preflight import model_init
from controller.preflight.found import Preflight, as_problem


def look_at_model(config: RunConfig, found: Preflight) -> None:
    """Add to `found` what is wrong with it, and its config."""
    path = config.model.path
    if path is None:
        found.problems += model_init.problems_of(config.model.init or {})
        tokenizer = config.model.tokenizer
        if tokenizer not in ("bytes", "from_model") and ":" not in tokenizer:
            found.problems += _faults_of_tokenizer(tokenizer)
        return
    errors, found.model, is_here = model_folder.problems_of(path, config.model.tokenizer)
    found.problems += [as_problem("model.path", error) for error in errors]
    if not is_here:
        found.notes.append(f"model.path: {path} is not on this machine and will be downloaded from the hub")
    if not errors and (config.trainer.lora is not None or config.warm_start is not None):
        found.problems += target_problems(config, model_folder.tensor_shapes(path))
    if found.model:
        found.problems += model_problems(config, found.model)
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
