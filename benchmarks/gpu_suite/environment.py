"""Part `environment`: machine, versions, and the limits that the other parts are compared with."""

from __future__ import annotations

import inspect
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu_suite import measure
from benchmarks.gpu_suite.case import Context

PACKAGES = ("transformers", "numpy", "safetensors", "msgspec", "pydantic", "pyzmq", "flash-attn", "triton")


def run(context: Context) -> None:
    """Write one row per kind of fact."""
    device = torch.device(context.device)
    context.run("environment", "device", 0, lambda: _device(device))
    context.run("environment", "versions", 0, _versions)
    context.run("environment", "varlen_attn", 0, _varlen)
    context.run("limits", "copy_bytes_per_s", 2, lambda: {"value": measure.copy_bandwidth(device)})
    context.run("limits", "bfloat16_matmul_flop_per_s", 2, lambda: {"value": measure.matmul_peak(device)})
    if device.type == "cuda":
        for name, rate in measure.host_copy_bandwidths(device).items():
            context.run("limits", f"{name}_bytes_per_s", 0, partial(dict, value=rate))


def _device(device: torch.device) -> Mapping[str, Any]:
    if device.type != "cuda":
        return {"value": "cpu, a self-check of the suite: its figures have no meaning"}
    facts = torch.cuda.get_device_properties(device)
    return {
        "value": facts.name,
        "memory_gib": round(facts.total_memory / measure.GIB, 1),
        "multiprocessors": facts.multi_processor_count,
        "capability": f"{facts.major}.{facts.minor}",
        "driver": _driver(),
        "shared_memory_free_gib": round(shutil.disk_usage("/dev/shm").free / measure.GIB, 1),
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


def _versions() -> Mapping[str, Any]:
    found = {"value": f"torch {torch.__version__}", "cuda": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _varlen() -> Mapping[str, Any]:
    if find_spec("torch.nn.attention.varlen") is None:
        return {"value": "torch has no variable-length kernel"}
    from torch.nn.attention.varlen import varlen_attn

    return {"value": ", ".join(inspect.signature(varlen_attn).parameters)}
