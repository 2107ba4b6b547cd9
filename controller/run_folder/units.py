"""Formats quantities as text."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """A number of bytes, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
