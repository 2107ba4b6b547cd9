"""Names of devices in settings: `cpu`, `cuda` and `cuda:N`; and `auto`, which only a configuration that is being loaded
contains.

`controller/config/auto_devices.py` replaces `auto`. Code that compares the name of a device does it here, where `auto`
is an error and not silently something other than a CPU.
"""

from __future__ import annotations

import re

AUTO = "auto"
NAMES = "auto, cpu, cuda or cuda:N"
"""The valid values, for messages."""
_CUDA = re.compile(r"cuda(?::(\d+))?")


def is_device(name: str) -> bool:
    """Return whether it is `cpu`, `cuda` or `cuda:N`."""
    return name == "cpu" or _CUDA.fullmatch(name) is not None


def resolved(device: str) -> str:
    """Return the name of a device unchanged. `auto` is an AssertionError: it is replaced when a config is loaded."""
    assert device != AUTO, "device: auto is replaced when a configuration is loaded"
    return device


def names_cpu(device: str) -> bool:
    """Return whether the device is `cpu`. `auto` is an AssertionError."""
    return resolved(device) == "cpu"


def names_gpu(device: str) -> bool:
    """Return whether the device is an NVIDIA GPU. `auto` is an AssertionError.

    Example:
        >>> names_gpu("cuda:1")
        True
    """
    return resolved(device).startswith("cuda")


def index_of(device: str) -> int | None:
    """Index of a GPU, 0 for `cuda`; None if the device is no GPU. `auto` is an AssertionError.

    Example:
        >>> index_of("cuda:3")
        3
    """
    match = _CUDA.fullmatch(resolved(device))
    return int(match.group(1) or 0) if match else None
