"""Which launcher a run gets.

Owns: the choice by `launch.kind`. Refuses: opening it.
"""

from __future__ import annotations

from controller.config import RunConfig
from controller.launch.cluster.launcher import RayLauncher
from controller.launch.launcher import Launcher
from controller.launch.local import LocalLauncher
from controller.run_folder import RunFolder


def launcher_for(config: RunConfig, folder: RunFolder) -> Launcher:
    """On this machine, or on a Ray cluster (ray itself is imported when it is opened)."""
    if config.launch.kind == "ray":
        return RayLauncher(config, folder.logs, folder.root, str(folder.read_state()["run_id"]))
    return LocalLauncher(folder.logs, config.launch.host)
