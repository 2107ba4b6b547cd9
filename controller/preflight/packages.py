"""Checks for packages and modules that a config requires and that are not installed.

User modules are imported in user_code.py, in a separate process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from controller.config.backends import backend_of
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig, missing
from controller.telemetry.sink_kinds import is_installed, sinks_of


def problems_of(config: RunConfig) -> Iterator[Problem]:
    """Problems at the keys that require the packages."""
    if config.trainer.attention == "flash_attn" and find_spec("flash_attn") is None:
        yield Problem(
            ("trainer.attention",),
            "the `flash_attn` package is not installed",
            "pip install 'areal-like[flash-attn]', or set trainer.attention: auto (torch's own kernel)",
        )
    for required in backend_of(config).packages:
        if find_spec(required.module) is None:
            yield Problem(("trainer.backend",), f"the package {required.module} is not installed", required.remedy)
    package = launcher_of(config).package
    if package and find_spec(package) is None:
        remedy = f"pip install 'areal-like[{package}]', or set launch.kind: local"
        yield Problem(("launch.kind",), f"the package {package} is not installed", remedy)
    for sink in sinks_of(config.metrics):
        if not is_installed(sink.package):
            yield Problem((sink.key,), f"the package {sink.package} is not installed", sink.remedy)
    for key, what, remedy in missing(config.reward):
        yield Problem((f"reward.{key}",), what, remedy)
    named = [(f"reward.scorers.{index}.kind", scorer.kind) for index, scorer in enumerate(config.reward.scorers)]
    named.append(("rollout.workflow", config.rollout.workflow))
    if config.reward.environment is not None:
        named.append(("reward.environment.kind", config.reward.environment.kind))
    for key, name in named:
        module, colon, _ = name.partition(":")
        if colon and PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
            yield Problem(
                (key,), f"there is no module `{module}`", "put the module into the current folder, or install it"
            )
