"""Measures times, peak memory, and the machine's bandwidth and matrix rate, on a CPU or a CUDA device."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_suite.case import Skip

GIB = 1 << 30


def finish(device: torch.device) -> None:
    """Wait for the device: on CUDA a call returns before its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_s(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    finish(device)
    start_s = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start_s


def median_s(work: Callable[[], Any], device: torch.device, *, repeats: int = 5, warmups: int = 2) -> float:
    """Median seconds of a call after warm-ups (kernel loading, library handles, the allocator's first blocks)."""
    for _ in range(warmups):
        work()
    return statistics.median(wall_s(work, device) for _ in range(repeats))


class Peak:
    """Result of `peak_memory`, set when the block ends."""

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        """Peak of the allocated bytes minus those allocated before; None on a CPU, for which torch has no count."""


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the allocations of a block."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return
    finish(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield peak
    finish(device)
    peak.num_bytes = torch.cuda.max_memory_allocated(device) - before


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def require_memory(need_bytes: int, device: torch.device) -> None:
    """Raise Skip if `need_bytes` do not fit with a reserve of a tenth."""
    free = free_bytes(device)
    if free is not None and need_bytes > 0.9 * free:
        raise Skip(f"needs about {need_bytes / GIB:.1f} GiB of GPU memory, {free / GIB:.1f} GiB are free")


# ---------------------------------------------------------------- the machine's limits


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy inside the device, read and written counted."""
    num_bytes = 2 * GIB if device.type == "cuda" else 32 << 20
    free = free_bytes(device)
    if free is not None:
        num_bytes = min(num_bytes, free // 8)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), device, repeats=10, warmups=3)
    return 2 * num_bytes / seconds


def matmul_peak(device: torch.device) -> float:
    """Operations per second of a large bfloat16 matrix product on random numbers (zeros run faster)."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=torch.float32).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    seconds = median_s(lambda: torch.mm(left, right, out=out), device, repeats=15, warmups=5)
    return 2 * size**3 / seconds


def host_copy_bandwidths(device: torch.device) -> dict[str, float]:
    """Bytes per second between host and device: pageable memory, which weight transfer uses now, and pinned memory."""
    num_bytes = 512 << 20
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for kind in ("pageable", "pinned"):
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
        rates[f"{kind}_to_device"] = num_bytes / median_s(partial(there.copy_, here), device, repeats=3)
        rates[f"{kind}_to_host"] = num_bytes / median_s(partial(here.copy_, there), device, repeats=3)
    return rates
