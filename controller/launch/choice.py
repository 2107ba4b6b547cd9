"""Makes the launcher of a run from its descriptor, and surveys the machines on which it would start processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_like.import_path import import_object
from controller.config.launcher_descriptor import KIND_KEY
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.launch import early
from controller.launch.launcher import Launcher
from controller.run_folder.run_folder import RunFolder


@dataclass
class Survey:
    """Result of `areal-like validate` about the machines a run would use."""

    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    """Whether there was nothing to survey."""
    seats: list[str] = field(default_factory=list)
    """Placement of the processes, a line per node."""


def launcher_for(config: RunConfig, folder: RunFolder) -> Launcher:
    """Make the launcher of `launch.kind`, not opened yet. Raises UserError if it cannot be imported."""
    launcher: Launcher = import_object(launcher_of(config).factory, KIND_KEY)(config, folder)
    if not launcher.is_forking:
        early.discard()
    return launcher


def survey(config: RunConfig) -> Survey:
    """Survey the machines, if the launcher supports it. Raises UserError if it cannot be imported."""
    name = launcher_of(config).survey
    found: Survey = import_object(name, KIND_KEY)(config) if name else Survey()
    return found
