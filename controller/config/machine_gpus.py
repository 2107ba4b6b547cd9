"""Counts the NVIDIA GPUs of this machine. torch is not imported."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def count_gpus() -> int:
    """Number of NVIDIA GPUs visible to CUDA, determined without torch."""
    present = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [part.strip() for part in visible.split(",") if part.strip()]
    shown = named.index("-1") if "-1" in named else len(named)  # CUDA ignores an invalid index and all after it
    return min(present, shown)


def torch_build() -> str:
    """Version of the installed torch, which ends with `+cpu` in a build without CUDA; empty if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def is_cpu_build(build: str) -> bool:
    """Return whether this version of torch has no CUDA."""
    return build.endswith("+cpu")


def usable_gpus() -> int:
    """Number of GPUs that a run can use: 0 with a CPU build of torch."""
    num_gpus = count_gpus()
    return 0 if not num_gpus or is_cpu_build(torch_build()) else num_gpus
