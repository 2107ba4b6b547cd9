"""The machines that a config is made for, where they are not the one it is read on."""

from __future__ import annotations

from areal_like.settings import Settings


class HardwareSettings(Settings):
    """What `areal-like validate` and `simulate` judge the run by. It changes nothing in the run itself."""

    gpu: str | None = None
    """Kind of GPU: h100, h200, h800, h20, a100, l40s, b200. Memory is estimated against it, and hours by its speed;
    null: the memory of this machine's GPUs, and no hours."""
