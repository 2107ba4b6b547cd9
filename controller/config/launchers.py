"""The built-in launchers, and the lookup of the run's launcher from `launch.kind`.

A new launcher is added as a line in LAUNCHERS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from areal_like.errors import UserError
from areal_like.import_path import find_named
from controller.config.cluster_settings import PoolSettings
from controller.config.launch_settings import LaunchSettings
from controller.config.launcher_descriptor import KIND_KEY, LauncherDescriptor
from controller.config.problems import Problem
from controller.config.ray_descriptor import RAY
from controller.config.run_settings import RunSettings


class LocalDescriptor(LauncherDescriptor):
    """Processes on this machine."""

    name = "local"
    title = "the local launcher"
    factory = "controller.launch.local:make"


LOCAL = LocalDescriptor()
LAUNCHERS: Mapping[str, LauncherDescriptor] = {
    launcher.name: launcher
    for launcher in (
        LOCAL,
        RAY,
    )
}
"""By `launch.kind`."""


def find_launcher(kind: str) -> LauncherDescriptor:
    """The launcher of that kind, or the one at an import path. Raises UserError if there is none.

    Example:
        >>> find_launcher("ray").is_one_machine
        False
    """
    return find_named(kind, LAUNCHERS, LauncherDescriptor, noun="launcher", where=KIND_KEY)


def launcher_of(config: RunSettings) -> LauncherDescriptor:
    """The launcher of a run. Raises UserError."""
    return find_launcher(config.launch.kind)


def launcher_kind_problems(config: RunSettings) -> Iterator[Problem]:
    """Problem of an unknown launcher. All other checks of a configuration depend on the launcher."""
    try:
        launcher_of(config)
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)


def written_launcher(section: Any) -> tuple[LauncherDescriptor, PoolSettings | None]:
    """The launcher by the unvalidated `launch`, and what it reserves for each rollout worker; the local launcher if
    that is invalid, which is reported later.
    """
    try:
        launch = LaunchSettings.model_validate({} if section is None else section)
        launcher = find_launcher(launch.kind)
    except (ValidationError, UserError):
        return LOCAL, None
    return launcher, launcher.pool(launch, "rollout")
