"""Types in which the descriptor of an implementation reports problems with settings, and times of recovery.

Problems are shown by controller/config/problems.py.
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
    """The problem is a property of this machine; another machine may not have it."""


@dataclass(frozen=True)
class Recovery:
    """A failure from which the run recovers by itself. `keys`: the settings that bound the time; `longest_s`: longest
    time without progress.
    """

    what: str
    keys: tuple[str, ...]
    longest_s: float
