"""Helpers for CUDA devices: synchronisation before a clock is read, and a separate stream for staging.

All threads of a process share CUDA's default stream, where work runs in the order in which it was submitted.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from areal_like.errors import UserError
from areal_like.process import trim_heap


def find_device(name: str) -> torch.device:
    """The device with this name, as in `rollout.engine.device`. Raises UserError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"there is no device {name}", where="rollout.engine.device", remedy="use cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device is available",
            where="rollout.engine.device",
            remedy="set the device to cpu, or install a CUDA build of torch",
        )
    return device


def finish(device: torch.device) -> None:
    """Wait until the work that this thread has submitted to the device is done: on CUDA a call returns before that."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def give_back(device: torch.device) -> None:
    """Return freed memory to the device, or to the operating system."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        trim_heap()


@contextlib.contextmanager
def during_generation(device: torch.device) -> Iterator[None]:
    """Run the copies in the block concurrently with generation; they are done when the block ends.

    On CUDA they use a separate stream, which first waits for the work that is queued now: the last steps that use the
    weights to be overwritten.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
