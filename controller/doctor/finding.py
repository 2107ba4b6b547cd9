"""Checks and their findings. Pure data.

ok       it is present and works
warning  the quickstart runs, but something else would not, or it would be slow
problem  the quickstart does not run on this machine; the doctor's exit status is 1
absent   optional, and not installed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from controller.doctor.machine import Machine

Verdict = Literal["ok", "warning", "problem", "absent"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. `advice` says in one sentence how to install or fix it; `data` is for --json."""

    verdict: Verdict
    found: str
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def ok(found: str, **data: Any) -> Finding:
    """Make a finding: it is present and works."""
    return Finding("ok", found, "", data)


def warning(found: str, advice: str, **data: Any) -> Finding:
    """Make a finding: something other than the quickstart is affected."""
    return Finding("warning", found, advice, data)


def problem(found: str, advice: str, **data: Any) -> Finding:
    """Make a finding: the quickstart does not run on this machine."""
    return Finding("problem", found, advice, data)


def absent(found: str, advice: str = "", **data: Any) -> Finding:
    """Make a finding: optional, and not installed."""
    return Finding("absent", found, advice, data)


NOT_HERE = absent("not on this system")
"""Result of a check that is only supported on another operating system."""


@dataclass(frozen=True)
class Check:
    """One check. `look` returns None if there is nothing to report."""

    topic: str
    name: str
    look: Callable[[Machine], Finding | None]
    deadline_s: float = 30.0
    is_needed: bool = False
    """Whether the quickstart requires it: a check that fails or hangs is then a problem, otherwise a warning."""


@dataclass(frozen=True)
class Line:
    """A check with its finding and its duration."""

    topic: str
    name: str
    finding: Finding
    wall_s: float


def size(num_bytes: float) -> str:
    """Bytes as text, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB" if num_bytes < 1000 else f"{num_bytes / 1000:.3g} TB"


def count(number: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
