"""Checks whether this machine can run a config, and raises all problems as one error.

The checks are in controller/preflight/.
"""

from __future__ import annotations

from controller.config.loading import LoadedConfig
from controller.config.problems import ConfigError
from controller.preflight.found import Preflight, Purpose
from controller.preflight.preflight import look


def look_at_machine(loaded: LoadedConfig, purpose: Purpose) -> Preflight:
    """Look at the machine. Raises ConfigError with everything that stands in the way."""
    found = look(loaded.config, purpose)
    problems = found.problems + ([] if purpose == "validate" else found.absent)
    if problems:
        raise ConfigError([problem.placed(loaded.document.where) for problem in problems], loaded.source)
    return found
