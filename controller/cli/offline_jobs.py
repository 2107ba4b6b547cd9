"""The commands that train from files: a new run, and the resumption of one.

Creates the run folder and checks on resume that its files have not changed. The run itself is in
runtime/offline_session.py.

state.json of such a run has the key `objective`, by which `resume` recognises it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_like.errors import UserError
from areal_like.process import private_files
from controller.cli.jobs import announce, new_folder, run_to_end
from controller.config.offline_config import Objective, OfflineConfig
from controller.config.offline_loading import LoadedOffline, build_offline
from controller.run_folder.registry import enlist
from controller.run_folder.run_folder import RunFolder, is_from_files
from controller.runtime.offline_session import OfflineSession
from controller.wiring.offline import check_rows, refuse_other_rows

COMMANDS: Mapping[str, Objective] = {"sft": "sft", "dpo": "dpo", "reward-model": "reward_model"}
"""Objective of each command."""


@private_files()
def start(loaded: LoadedOffline, command: str) -> int:
    """Train in a new run folder; return the exit status. Raises UserError, OperationError."""
    config, objective = loaded.config, COMMANDS[command]
    digests = check_rows(config, objective)
    folder = new_folder(config, config.name, command, digests, source=loaded.source, objective=objective)
    return run_to_end(OfflineSession(config, folder, objective).run())


def is_offline_run(folder: RunFolder) -> bool:
    """Return whether the folder belongs to a run from files. Raises UserError if its state.json is damaged."""
    return is_from_files(folder.read_state())


@private_files()
def resume(folder: RunFolder) -> int:
    """Continue an interrupted or crashed run from its last checkpoint; return the exit status.

    Raises UserError if it is running or finished, or if its files have changed; OperationError.
    """
    folder.refuse_if_running()
    state = folder.read_state()
    objective = _objective_of(state, folder)
    if state.get("status") == "finished":
        remedy = "start a new run from its model (model.path=...), or a new run with more epochs"
        raise UserError("the run is finished", where=str(folder.root), remedy=remedy)
    if (home := Path(state.get("started_in", "."))).is_dir():
        os.chdir(home)
    config = read_config(folder)
    refuse_other_rows(config, state.get("data"), objective)
    folder.write_state("running")
    enlist(folder)
    announce(folder)
    return run_to_end(OfflineSession(config, folder, objective).run())


def _objective_of(state: Mapping[str, Any], folder: RunFolder) -> Objective:
    found = state.get("objective")
    for known in COMMANDS.values():
        if known == found:
            return known
    raise UserError(
        f"unknown training objective: {found}", where=str(folder.state), remedy="use a newer version of areal_like"
    )


def read_config(folder: RunFolder) -> OfflineConfig:
    """Read the resolved configuration of a run from files. Raises UserError if it is damaged."""
    try:
        data = yaml.safe_load(folder.config.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"the file cannot be read ({error})",
            where=str(folder.config),
            remedy="restore the file from a backup, or start a new run",
        ) from error
    config, problems = build_offline(data if isinstance(data, dict) else {})
    if config is None or problems:
        raise UserError("; ".join(str(problem) for problem in problems), where=str(folder.config))
    return config
