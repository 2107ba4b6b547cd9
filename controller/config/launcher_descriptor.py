"""Interface of launcher descriptors: properties of a launcher that the rest of the controller can read without
importing the launcher.

Processes are started in controller/launch/launcher.py. The descriptors are here and not next to the launchers, because
the configuration uses them and imports nothing of controller/launch.
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
    """Settings for a ledger that is written on the controller's own disk and copied into the run folder."""

    local_dir: str | None
    """None: the folder for temporary files."""
    every_s: float


class LauncherDescriptor:
    """Describes one launcher. Subclass it, override what differs, and register an instance (launchers.py) or set
    `launch.kind` to its import path.
    """

    name: str
    """Value of `launch.kind`, if it is registered."""
    title: str
    """Name of the launcher in messages."""
    factory: str
    """`module:function`, called with the RunConfig and the RunFolder; returns the Launcher."""
    survey: str = ""
    """`module:function`, called with the RunConfig by `validate`; returns a Survey. Empty: nothing is surveyed."""
    section: str = ""
    """Its section of `launch`; empty: it is configured by `launch.options`, or has no settings."""
    package: str = ""
    """Distribution that must be installed, and the extra that installs it; empty: none."""
    is_one_machine: bool = True
    """All processes run on the controller's machine and share its memory, folders and devices."""
    chooses_gpus: bool = False
    """Each process sees only its own GPUs: `cuda` is the first of them."""
    host_key: str = "launch.host"
    """The setting of the address that the controller binds and advertises."""
    host_hint: str = "127.0.0.1"
    """Remedy if the address cannot be bound."""
    job_folder: str = ""
    """Part of the path of every folder that is deleted with a job; empty: none is."""

    def host(self, launch: LaunchSettings) -> str | None:
        """Address the controller binds; None: not known before the start."""
        return launch.host

    def pool(self, launch: LaunchSettings, name: str) -> PoolSettings | None:
        """What is reserved for each process of the pool `rollout`, `trainer` or `reward`; None: nothing is."""
        return None

    def mirroring(self, launch: LaunchSettings) -> Mirroring | None:
        """Where the ledger is written if the run folder is not suitable."""
        return None

    def node_wait_s(self, launch: LaunchSettings) -> float:
        """Time that a process may wait for resources before it counts as lost."""
        return launch.startup_timeout_s

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[SettingProblem]:
        """Problems of `launch.options`. By default, a launcher has no options."""
        if options:
            what = f"{self.title} has no options (here: {', '.join(options)})"
            yield SettingProblem((OPTIONS_KEY, KIND_KEY), what, f"launch.{self.section}" if self.section else "{}")

    def setting_problems(self, launch: LaunchSettings) -> Iterator[SettingProblem]:
        """Settings of `launch` that contradict each other. Pure."""
        yield from ()
