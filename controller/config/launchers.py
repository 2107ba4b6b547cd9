"""The launchers that come with this program, and the one that a run has.

Owns: from `launch.kind` to a descriptor. Refuses: knowing anything else of a launcher. A new one is a line in
LAUNCHERS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from areal_like.errors import UserError
from areal_like.import_path import find_named
from controller.config.cluster_settings import PoolSettings
from controller.config.launch_settings import LaunchSettings
from controller.config.launcher_descriptor import KIND_KEY, LauncherDescriptor
from controller.config.problems import Problem
from controller.config.ray_descriptor import RAY

if TYPE_CHECKING:
    from controller.config.run_config import RunConfig


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
    """The launcher of that kind, or the one at an import path. Raises UserError where there is none.

    Example:
        >>> find_launcher("ray").is_one_machine
        False
    """
    return find_named(kind, LAUNCHERS, LauncherDescriptor, noun="launcher", where=KIND_KEY)


def launcher_of(config: RunConfig) -> LauncherDescriptor:
    """The launcher of a run. Raises UserError."""
    return find_launcher(config.launch.kind)


def launcher_kind_problems(config: RunConfig) -> Iterator[Problem]:
    """That there is no such launcher. Everything else about a configuration asks for it."""
    try:
        launcher_of(config)
    except UserError as error:
        yield Problem((KIND_KEY,), error.what, error.remedy)


def written_launcher(section: Any) -> tuple[LauncherDescriptor, PoolSettings | None]:
    """The launcher by `launch` as it was written, and what it reserves for each rollout worker; the local one where
    that is wrong, which is reported later.
    """
    try:
        launch = LaunchSettings.model_validate({} if section is None else section)
        launcher = find_launcher(launch.kind)
    except (ValidationError, UserError):
        return LOCAL, None
    return launcher, launcher.pool(launch, "rollout")
