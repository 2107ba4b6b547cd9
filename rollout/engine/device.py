"""What a CUDA device needs that a CPU does not: a wait before a clock is read, a stream of its own for staging.

Owns: finding the device a config names, waiting for it, the staging stream, freed memory. Refuses: tensors.

All threads of a process share CUDA's default stream, where work runs in the order it was asked for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from areal_like.errors import UserError
from areal_like.process import trim_heap


def find_device(name: str) -> torch.device:
    """The device of a name as in `rollout.engine.device`. Raises UserError where there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"no such device: {name}", where="rollout.engine.device", remedy="cpu, cuda or cuda:N"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device here", where="rollout.engine.device", remedy="cpu, or a CUDA build of torch")
    return device


def finish(device: torch.device) -> None:
    """Wait until what this thread has asked of the device is done: on CUDA a call returns before its work is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def give_back(device: torch.device) -> None:
    """What was freed goes back to the device, or to the operating system, for other processes to have."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    else:
        trim_heap()


@contextlib.contextmanager
def during_generation(device: torch.device) -> Iterator[None]:
    """Copies in the block do not stand between the steps of generation; they are done when the block ends.

    On CUDA they get a stream of their own, which first waits for what is queued by now: the last steps that computed
    with the weights about to be overwritten.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
