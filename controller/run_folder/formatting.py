"""Formats time spans, sizes and numbers for the commands, and makes text of others printable."""

from __future__ import annotations

import math

from areal_like.plain_text import printable as printable


def span(seconds: float) -> str:
    """A length of time in at most two units: `8 s`, `2 min 5 s`, `3 h 20 min`, `4 d 2 h`."""
    whole = max(0, round(seconds))
    for unit, unit_s, part, part_s in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit_s:
            rest = (whole % unit_s) // part_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def ago(seconds: float) -> str:
    """Time since a moment; clocks of two machines may differ, so future times are `just now`."""
    return "just now" if seconds < 1.5 else f"{span(seconds)} ago"


def megabytes(value_mb: float) -> str:
    """Memory as `312 MB` or `1.4 GB`."""
    return f"{value_mb:.0f} MB" if value_mb < 1000 else f"{value_mb / 1000:.1f} GB"


def percent(share: float) -> str:
    """A share as `41 %`."""
    return f"{100 * share:.0f} %"


def number(value: object, digits: int = 3) -> str:
    """A number with the given decimals; `-` for None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}"
