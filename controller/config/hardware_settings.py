"""The section `hardware`: the machines that a config is made for, if they are not the one on which it is validated."""

from __future__ import annotations

from areal_like.settings import Settings


class HardwareSettings(Settings):
    """Hardware that `areal-like validate` and `simulate` assume for the run. It changes nothing in the run itself."""

    gpu: str | None = None
    """Kind of GPU: h100, h200, h800, h20, a100, l40s, b200. Its memory and speed are used for the estimates of memory
    and hours; null: the memory of this machine's GPUs, and no estimate of hours.
    """
