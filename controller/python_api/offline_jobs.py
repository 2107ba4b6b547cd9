"""`sft`, `dpo` and `reward_model`: training from files, in a child process. The shared part is in jobs.py."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

from areal_like.errors import UserError
from controller.config.loading import apply_overrides, checked
from controller.config.offline_config import OfflineConfig
from controller.config.offline_loading import build_offline, is_offline, is_offline_file, load_offline
from controller.config.yaml_document import Document
from controller.python_api.jobs import start
from controller.python_api.run import Run

Config = str | os.PathLike[str] | Mapping[str, Any]


def sft(config: Config, /, **overrides: Any) -> Run:
    """Start supervised training on the completions of a file, and return as soon as its run folder exists.

    The run ends with the calling process; `wait()` blocks until it is finished. `metrics()` has the rows of the steps
    and `metrics("eval")` those of the evaluations.

    Args:
        config: path of a YAML file, name of a shipped config, a run's folder, or a dict.
        overrides: values of single keys, as for `train`. `data__train` is the path of a file.

    Returns:
        The run, in progress.

    Raises:
        UserError: the configuration or a row cannot be used; the text is the command line's.
        RunFailed: the run failed before its folder existed.

    Example:
        >>> run = areal_like.sft("offline/sft", data__train="rows.jsonl", trainer__lora={"rank": 16})
        >>> run.wait().final_model
    """
    return _start("sft", config, overrides)


def dpo(config: Config, /, **overrides: Any) -> Run:
    """Start direct preference optimisation on the pairs of a file. The starting model is the reference.

    Args:
        config: as for `sft`.
        overrides: as for `sft`; `model__path` is usually the model of a supervised run.

    Returns:
        The run, in progress.

    Raises:
        UserError: as for `sft`.
        RunFailed: as for `sft`.

    Example:
        >>> areal_like.dpo("offline/dpo", model__path=run.final_model).wait().final_model
    """
    return _start("dpo", config, overrides)


def reward_model(config: Config, /, **overrides: Any) -> Run:
    """Start the training of a reward model on the pairs of a file.

    Args:
        config: as for `sft`.
        overrides: as for `sft`.

    Returns:
        The run, in progress. Scorer `reward_model` loads its `final_model`.

    Raises:
        UserError: as for `sft`.
        RunFailed: as for `sft`.

    Example:
        >>> areal_like.reward_model("offline/reward_model").wait().final_model
    """
    return _start("reward-model", config, overrides)


def _start(command: str, config: Config | OfflineConfig, overrides: Mapping[str, Any]) -> Run:
    return start(command, config, overrides, check_file=_check_file, check=_check)


def _check_file(name: str, words: Sequence[str]) -> None:
    if not is_offline_file(name, words):
        raise _not_from_files(name)
    load_offline(name, words)


def _check(document: Document, words: Sequence[str]) -> None:
    changed = Document(data=copy.deepcopy(document.data), source=document.source)
    apply_overrides(changed, words)
    if not is_offline(changed.data):
        raise _not_from_files(document.source)
    checked(document, words, build_offline)


def _not_from_files(source: str) -> UserError:
    what = "data.train is not a file, so this is the config of a run with rollouts"
    return UserError(what, where=source, remedy="set data.train to a JSONL file; see configs/offline for examples")
