"""Resolved configurations of runs that an earlier version started, so that they can be resumed.

Owns: `upgrade`, what to say of a removed key. Refuses: configurations that users write: there a removed key is an error
with that remedy (problems.py).

A resolved configuration lists every key, at its default where the user gave none. A default that has changed since then
was therefore nobody's choice, and the present default takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

REMOVED: Mapping[str, str] = {"launch.curve": "removed: sockets are always encrypted; delete the line"}
"""Keys of earlier versions -> what to do about them."""
REMOVED_KEY = "curve"
"""Of `launch`: whether sockets have keys. The version that wrote it had CHANGED_DEFAULTS."""
CHANGED_DEFAULTS: Mapping[tuple[str, ...], object] = {
    ("launch", "stall_after_s"): 300.0,
    ("rollout", "engine", "sglang", "load_timeout_s"): 600.0,
    ("rollout", "engine", "sglang", "stall_timeout_s"): 300.0,
}
"""Defaults of that version that are others today."""


def upgrade(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration in today's keys; unchanged where today's version wrote it."""
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
    """The section at `path`; an empty one where there is none."""
    section: Any = data
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}
