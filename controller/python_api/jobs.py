"""`train`, `evaluate` and `resume`: each starts the command of the same name in a child process.

Converts configurations and overrides given as Python values. Training from files is in offline_jobs.py, the child
process in controller_process.py, the run in run.py, functions as names in import_names.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.import_check import USER_PATH, check_not_shadowed
from controller.config.loading import check_document, load_config
from controller.config.offline_config import OfflineConfig
from controller.config.run_config import RunConfig
from controller.config.yaml_document import Document
from controller.python_api import controller_process
from controller.python_api.import_names import import_name
from controller.python_api.run import Run, find_folder
from controller.run_folder.owner_host import refuse_if_elsewhere

CONFIG_SOURCE = "config"
"""Name in messages of a configuration given as a value."""

Config = str | os.PathLike[str] | Mapping[str, Any] | RunConfig


def train(config: Config, /, **overrides: Any) -> Run:
    """Start a training job in a child process and return as soon as its run folder exists.

    The run ends with the calling process; `wait()` blocks until it is finished.

    Args:
        config: path of a YAML file, name of a shipped config, a run's folder, a dict, or a `RunConfig`.
        overrides: values of single keys, as `key.path=value` on the command line. `trainer__optimizer__lr=1e-4` and
            `**{"trainer.optimizer.lr": 1e-4}` are the same. A dict replaces its whole section. Scorers, workflows and
            generators may be given as functions and classes.

    Returns:
        The run, in progress.

    Raises:
        UserError: the configuration, the data or the machine does not allow it; the text is the command line's.
        RunFailed: the run failed before its folder existed.

    Example:
        >>> run = areal_like.train("quickstart", num_steps=10)
        >>> for step in run:
        ...     print(step["step"], step["reward_mean"])
        >>> run.wait().final_model
    """
    return start("train", config, overrides)


def evaluate(config: Config, /, **overrides: Any) -> Run:
    """Start an evaluation of the model on `data.eval`; the accuracy is in `wait().status.accuracy`, by version.

    Args:
        config: as for `train`; a run's folder selects its configuration.
        overrides: as for `train`; `model__path=...` names the checkpoint.

    Returns:
        The evaluation, as a separate run.

    Raises:
        UserError: as for `train`.
        RunFailed: as for `train`.

    Example:
        >>> done = areal_like.evaluate("runs/first", model__path="runs/first/final").wait()
        >>> done.status.accuracy
    """
    return start("eval", config, overrides)


def resume(run: str | os.PathLike[str] | Run, /, *, accept_loss: bool = False) -> Run:
    """Continue an interrupted or crashed run from its last checkpoint and its ledger.

    Args:
        run: its folder, its name, or its `Run`.
        accept_loss: continue even if files of the run are missing or older than others, from the newest state that
            ledger and checkpoints share.

    Returns:
        The run, in progress.

    Raises:
        UserError: there is no such run, it is finished, or its data changed.
        RunFailed: as for `train`.

    Example:
        >>> areal_like.resume("runs/first").wait()
    """
    check_caller()
    folder = find_folder(run.folder if isinstance(run, Run) else run)
    refuse_if_elsewhere(folder)
    folder.refuse_if_running()
    return Run._started(controller_process.start(["resume", str(folder.root), *["--accept-loss"] * accept_loss]))


def start(
    command: str,
    config: Config | OfflineConfig,
    overrides: Mapping[str, Any],
    *,
    check_file: Callable[[str, Sequence[str]], object] = load_config,
    check: Callable[[Document, Sequence[str]], object] = check_document,
) -> Run:
    """Start `areal-like COMMAND` with a config and overrides.

    check_file, check: raise UserError for a bad config, given by name or as a document.
    """
    check_caller()
    words = [override_text(key, value) for key, value in overrides.items()]
    if isinstance(config, str | os.PathLike):
        name = os.fspath(config)
        check_file(name, words)
        return Run._started(controller_process.start([command, name, *words]))
    if isinstance(config, RunConfig | OfflineConfig):
        data = config.model_dump(mode="json")
    else:
        data = plain_value(config, CONFIG_SOURCE)
    if not isinstance(data, dict):
        raise UserError(
            f"the config cannot be of type {type(config).__name__}",
            where=CONFIG_SOURCE,
            remedy="pass a path, a dict or a RunConfig",
        )
    text = _json(data, CONFIG_SOURCE, indent=1)  # JSON is YAML with quoted text
    check(Document(data=data, source=CONFIG_SOURCE), words)
    return Run._started(controller_process.start([command, controller_process.CONFIG, *words], config_text=text))


def check_caller() -> None:
    """Raise UserError in a process of a run, which imports the calling script to find a function."""
    if USER_PATH in os.environ:
        raise UserError(
            "a process of a run imports this module to find a scorer or a workflow, and the import starts another run",
            where="areal_like",
            remedy='put the call below `if __name__ == "__main__":`',
        )
    check_not_shadowed()


def override_text(key: str, value: Any) -> str:
    """Format `key.path=value` for the command line; a double underscore in the key is replaced by a dot. Raises
    UserError.
    """
    path = key.replace("__", ".")
    return f"{path}={_json(plain_value(value, path), path)}"


def _json(value: Any, where: str, *, indent: int | None = None) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError as error:
        raise UserError("the value is not a finite number", where=where, remedy="use a finite number") from error


def plain_value(value: Any, where: str) -> Any:
    """Convert the value to plain configuration data: functions and classes become import paths. Raises UserError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}.{index}") for index, item in enumerate(value)]
    if callable(value):
        return import_name(value, where)
    raise UserError(
        f"a configuration cannot contain a value of type {type(value).__name__}",
        where=where,
        remedy="use numbers, strings, lists and dicts",
    )
