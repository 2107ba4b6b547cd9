"""Supported versions of Python and torch, checked before anything else is imported."""

from __future__ import annotations

import sys

PYTHON_RANGE = ((3, 11), (3, 13))

TORCH_RANGE = ((2, 11), (2, 15))


def python_fault(found: tuple[int, ...]) -> str:
    """Error if this Python version is not supported; else empty."""
    low, high = PYTHON_RANGE
    if low <= found[:2] <= high:
        return ""
    needed = f"areal_like runs on Python {_dotted(low)} to {_dotted(high)}"
    return f"{needed}, but this is Python {_dotted(found[:2])} ({sys.executable})"


def torch_fault(found: str | None) -> str:
    """Error if the installed torch version is not supported; else empty. Imports nothing."""
    low, high = TORCH_RANGE
    needed = f"areal_like runs on torch {_dotted(low)} to {_dotted(high)}"
    if found is None:
        return f"{needed}, but torch is not installed ({sys.executable})"
    try:
        parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    except ValueError:
        return f"{needed}, but the version of the installed torch is {found}"
    return "" if low <= parts <= high else f"{needed}, but torch {found} is installed ({sys.executable})"


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
