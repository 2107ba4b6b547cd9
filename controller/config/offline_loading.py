"""Loads an OfflineConfig from a file name and overrides, and decides whether a config file is one.

What is shared with the config of a run with rollouts is in loading.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from controller.config.loading import Loaded, apply_overrides, checked, read_document, without_empty_sections
from controller.config.offline_config import OfflineConfig, offline_problems
from controller.config.problems import Problem, booleans_for_numbers, translate

LoadedOffline = Loaded[OfflineConfig]
"""A validated config of a run from files, and its source."""


def is_offline(data: Mapping[str, Any]) -> bool:
    """Return whether a config is one of a run from files: its `data.train` names a file, while in a run with rollouts
    it is a section.
    """
    section = data.get("data")
    return isinstance(section, Mapping) and isinstance(section.get("train"), str)


def is_offline_file(name: str, overrides: Sequence[str]) -> bool:
    """Same for a file with overrides from the command line. Raises UserError if there is no such file."""
    document = read_document(name)
    apply_overrides(document, overrides)
    return is_offline(document.data)


def load_offline(name: str, overrides: Sequence[str] = ()) -> LoadedOffline:
    """Read a config, apply overrides and validate it. Raises ConfigError with every problem, UserError."""
    return checked(read_document(name), overrides, build_offline)


def build_offline(data: Mapping[str, Any]) -> tuple[OfflineConfig | None, list[Problem]]:
    """Build an OfflineConfig, or None, with all problems."""
    data = without_empty_sections(OfflineConfig, data)
    try:
        config = OfflineConfig.model_validate(data)
    except pydantic.ValidationError as error:
        return None, translate(error, OfflineConfig) + booleans_for_numbers(OfflineConfig, data)
    problems = booleans_for_numbers(OfflineConfig, data) or list(offline_problems(config))
    return (None if problems else config), problems
