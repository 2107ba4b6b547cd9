"""Checks of a run from files before it starts: its rows, starting model, adapter targets and GPUs.

`areal-like validate` and the commands that train report the same problems. Rows are checked in
controller/wiring/offline.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.errors import UserError
from controller.config import model_folder
from controller.config.loading import Loaded
from controller.config.offline_config import OfflineConfig
from controller.config.problems import ConfigError, Problem
from controller.config.validation.lora import missing_targets
from controller.preflight import starting_model
from controller.preflight.found import as_problem
from controller.preflight.machine import ranks_without_gpus
from controller.wiring.offline import check_rows_alone


def check_offline(loaded: Loaded[OfflineConfig]) -> None:
    """Check all but the rows, before a run starts. Raises ConfigError with every problem."""
    trainer = loaded.config.trainer
    _refuse(loaded, [*_model_problems(loaded.config), *ranks_without_gpus(trainer.device, trainer.ranks)])


def check_whole(loaded: Loaded[OfflineConfig]) -> None:
    """Check everything, for `areal-like validate`. Raises ConfigError with every problem.

    A run may be validated on another machine than its own, so GPUs are not counted.
    """
    _refuse(loaded, [*_row_problems(loaded.config), *_model_problems(loaded.config)])


def _refuse(loaded: Loaded[OfflineConfig], problems: list[Problem]) -> None:
    if problems:
        raise ConfigError([problem.placed(loaded.document.where) for problem in problems], loaded.source)


def _model_problems(config: OfflineConfig) -> Iterator[Problem]:
    path, lora = config.model.path, config.trainer.lora
    problems, _, _ = starting_model.problems_of(config.model)
    yield from problems
    if not problems and lora is not None:
        tensors = {} if path is None else model_folder.tensor_shapes(path)
        yield from missing_targets({"trainer.lora": lora}, config.model, tensors)


def _row_problems(config: OfflineConfig) -> Iterator[Problem]:
    try:
        check_rows_alone(config)
    except UserError as error:
        yield as_problem("data", error)
