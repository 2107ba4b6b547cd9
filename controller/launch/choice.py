"""Which launcher a run gets, and what it says of where it would start processes.

Owns: from a launcher's descriptor to the launcher. Refuses: opening it, knowing any launcher.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_like.import_path import import_object
from controller.config.launcher_descriptor import KIND_KEY
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.launch.launcher import Launcher
from controller.run_folder.run_folder import RunFolder


@dataclass
class Survey:
    """What `areal-like validate` says of the machines a run would use."""

    problems: list[Problem] = field(default_factory=list)
    absent: list[Problem] = field(default_factory=list)
    """There is nothing to look at from here."""
    seats: list[str] = field(default_factory=list)
    """Who would sit where, a line per node."""


def launcher_for(config: RunConfig, folder: RunFolder) -> Launcher:
    """The launcher of `launch.kind`, not opened yet. Raises UserError where it cannot be imported."""
    launcher: Launcher = import_object(launcher_of(config).factory, KIND_KEY)(config, folder)
    return launcher


def survey(config: RunConfig) -> Survey:
    """Look at the machines, where the launcher can before a run. Raises UserError where it cannot be imported."""
    name = launcher_of(config).survey
    found: Survey = import_object(name, KIND_KEY)(config) if name else Survey()
    return found
