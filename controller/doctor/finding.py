"""What a check is and what it finds. Pure data.

Owns: the verdicts and what each means. Refuses: looking at anything (topics/), running checks (runner.py).

    ok       it is there and works
    warning  the quickstart runs, something else would not, or it would be slow
    problem  the quickstart does not run here; the doctor's exit status is 1
    absent   optional, and not here
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
    """What one check found. `advice` says in one sentence how to get or fix it; `data` is for --json."""

    verdict: Verdict
    found: str
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def ok(found: str, **data: Any) -> Finding:
    """It is there and works."""
    return Finding("ok", found, "", data)


def warning(found: str, advice: str, **data: Any) -> Finding:
    """Something other than the quickstart suffers."""
    return Finding("warning", found, advice, data)


def problem(found: str, advice: str, **data: Any) -> Finding:
    """The quickstart does not run here."""
    return Finding("problem", found, advice, data)


def absent(found: str, advice: str = "", **data: Any) -> Finding:
    """Optional, and not here."""
    return Finding("absent", found, advice, data)


NOT_HERE = absent("not on this system")
"""What a check says that only one operating system can answer."""


@dataclass(frozen=True)
class Check:
    """One question to the machine. `look` returns None when there is nothing to say."""

    topic: str
    name: str
    look: Callable[[Machine], Finding | None]
    deadline_s: float = 30.0
    is_needed: bool = False
    """The quickstart needs it: a check that fails or hangs is then a problem, otherwise a warning."""


@dataclass(frozen=True)
class Line:
    """A check with what it found and how long that took."""

    topic: str
    name: str
    finding: Finding
    wall_s: float


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB" if num_bytes < 1000 else f"{num_bytes / 1000:.3g} TB"


def count(number: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
