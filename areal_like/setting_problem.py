"""What an implementation has against the settings of a run, and how long it may take to recover.

Owns: the two types in which an implementation's descriptor answers. Refuses: finding problems, and how they are shown
(controller/config/problems.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SettingProblem:
    """Settings that cannot work. `keys`: dotted paths, the first one named in the message; `remedy`: what to set."""

    keys: tuple[str, ...]
    what: str
    remedy: str = ""
    is_local: bool = False
    """Something that this machine lacks and another may have."""


@dataclass(frozen=True)
class Recovery:
    """Something that recovers by itself. `keys`: the settings that bound it; `longest_s`: without a sign of
    progress.
    """

    what: str
    keys: tuple[str, ...]
    longest_s: float
