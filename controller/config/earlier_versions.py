"""Upgrades resolved configurations of runs that an earlier version started, so that they can be resumed.

In configurations that users write, a removed key is an error with the remedy given here (problems.py).

A resolved configuration lists every key, including the ones left at their default. The file does not show which values
the user chose, so a value equal to a default that has changed since then is replaced by the present default.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

REMOVED: Mapping[str, str] = {"launch.curve": "remove this key: sockets are now always encrypted"}
"""Keys of earlier versions -> what to do about them."""
REMOVED_KEY = "curve"
"""Former key of `launch`: whether sockets are encrypted. A file with this key was written with CHANGED_DEFAULTS."""
CHANGED_DEFAULTS: Mapping[tuple[str, ...], object] = {
    ("launch", "stall_after_s"): 300.0,
    ("rollout", "engine", "sglang", "load_timeout_s"): 600.0,
    ("rollout", "engine", "sglang", "stall_timeout_s"): 300.0,
}
"""Defaults of that version that have changed since."""


def upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the configuration to today's keys; unchanged if it was written by today's version."""
    upgraded = copy.deepcopy(dict(data))
    launch = _section(upgraded, ("launch",))
    if REMOVED_KEY not in launch:
        return upgraded
    del launch[REMOVED_KEY]
    for path, default in CHANGED_DEFAULTS.items():
        section = _section(upgraded, path[:-1])
        if section.get(path[-1]) == default:
            del section[path[-1]]
    return upgraded


def _section(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The section at `path`; an empty one if it is missing."""
    section: Any = data
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}
