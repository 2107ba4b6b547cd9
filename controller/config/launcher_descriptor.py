"""What the rest of the controller asks of a launcher without importing it.

Owns: `LauncherDescriptor`, the base class of every launcher's description. Refuses: starting processes
(controller/launch/launcher.py). The descriptions are here and not next to the launchers, because the configuration asks
them and imports nothing of controller/launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.setting_problem import SettingProblem
from controller.config.cluster_settings import PoolSettings
from controller.config.launch_settings import LaunchSettings

KIND_KEY = "launch.kind"
OPTIONS_KEY = "launch.options"


@dataclass(frozen=True)
class Mirroring:
    """The ledger is written on the controller's own disk, and copied into the run folder."""

    local_dir: str | None
    """None: the folder for temporary files."""
    every_s: float


class LauncherDescriptor:
    """One launcher, for everything but starting processes. Subclass it, override what differs, and register an instance
    (launchers.py) or name it in `launch.kind` by import path.
    """

    name: str
    """Value of `launch.kind`, where it is registered."""
    title: str
    """In messages."""
    factory: str
    """`module:function`, called with the RunConfig and the RunFolder; returns the Launcher."""
    survey: str = ""
    """`module:function`, called with the RunConfig by `validate`; returns a Survey. Empty: nothing to look at."""
    section: str = ""
    """Its section of `launch`; empty: it is configured by `launch.options`, or not at all."""
    package: str = ""
    """Distribution that must be installed, and the extra that brings it; empty: none."""
    is_one_machine: bool = True
    """All processes run where the controller runs: they share its memory, its folders and its devices."""
    chooses_gpus: bool = False
    """Each process is shown GPUs of its own only: `cuda` is the first of those."""
    host_key: str = "launch.host"
    """The setting of the address that the controller binds and advertises."""
    host_hint: str = "127.0.0.1"
    """What to set it to where it cannot be bound."""
    job_folder: str = ""
    """In the path of every folder that is deleted with a job; empty: none is."""

    def host(self, launch: LaunchSettings) -> str | None:
        """Address the controller binds; None: not known before the start."""
        return launch.host

    def pool(self, launch: LaunchSettings, name: str) -> PoolSettings | None:
        """What is reserved for each process of the pool `rollout`, `trainer` or `reward`; None: nothing is."""
        return None

    def mirroring(self, launch: LaunchSettings) -> Mirroring | None:
        """Where the ledger is written if the run folder is no place for it."""
        return None

    def node_wait_s(self, launch: LaunchSettings) -> float:
        """Time for a process to wait for room before it counts as lost."""
        return launch.startup_timeout_s

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """What is wrong with `launch.options`. Here: that there are any."""
        if options:
            what = f"{self.title} has no options (here: {', '.join(options)})"
            yield SettingProblem((OPTIONS_KEY, KIND_KEY), what, f"launch.{self.section}" if self.section else "{}")

    def setting_problems(self, launch: LaunchSettings) -> Iterator[SettingProblem]:
        """Settings of `launch` that contradict each other. Pure."""
        yield from ()
