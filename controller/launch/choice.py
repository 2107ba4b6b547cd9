"""Which launcher a run gets, and how that starts its processes.

Owns: the choice by `launch.kind` and `launch.start_method`. Refuses: opening it.
"""

from __future__ import annotations

import sys

from controller.config.run_config import RunConfig
from controller.launch.cluster.launcher import RayLauncher
from controller.launch.launcher import Launcher
from controller.launch.local import LocalLauncher
from controller.run_folder.run_folder import RunFolder
from controller.wiring.process_specs import FORKED, PRELOAD


def launcher_for(config: RunConfig, folder: RunFolder) -> Launcher:
    """On this machine, or on a Ray cluster (ray itself is imported when it is opened)."""
    if config.launch.kind == "ray":
        return RayLauncher(config, folder.logs, folder.root, str(folder.read_state()["run_id"]))
    forked = FORKED if is_forking(config) else ()
    return LocalLauncher(folder.logs, config.launch.host, preload=PRELOAD, forked=forked)


def is_forking(config: RunConfig) -> bool:
    """Workers and trainer are forked from one process that has imported torch and transformers."""
    if config.launch.start_method != "auto":
        return config.launch.start_method == "forkserver"
    return sys.platform == "linux" and {*config.rollout_devices, *config.trainer_devices} == {"cpu"}
