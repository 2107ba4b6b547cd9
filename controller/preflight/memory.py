"""Checks whether the run fits into the memory of the trainer's devices and of this machine.

The numbers are computed in controller/config/trainer_memory.py and controller/config/memory/.
"""

from __future__ import annotations

import shutil
import subprocess

import psutil

from areal_like.decoder_shape import DecoderShape
from areal_like.emulation.machines import gpu_named
from controller.config.machine_gpus import count_gpus
from controller.config.memory.estimate import shape_of_run
from controller.config.memory.fit import fit_problems, fit_remarks, with_smallest_change
from controller.config.run_config import RunConfig
from controller.config.trainer_memory import (
    adapter_parameters,
    host_problem,
    memory_problem,
    outer_share,
    parameters_of,
    trainer_state,
)
from controller.preflight.found import Preflight

SMI_TIMEOUT_S = 20.0


def look_at_memory(config: RunConfig, found: Preflight, is_here: bool) -> None:
    """Of the trainer's devices: what none can hold is a problem, what those of this machine cannot hold is absent."""
    parameters = parameters_of(config, found.model)
    if parameters is None:
        return
    shape = shape_of_run(config, found.model)
    state = trainer_state(config, parameters, adapter_parameters(config, shape), outer_share(config, shape))
    named_bytes = None if config.hardware.gpu is None else gpu_named(config.hardware.gpu).memory
    gpu_bytes = _gpu_bytes() if is_here else 0.0
    if (problem := memory_problem(config, state, named_bytes)) is not None:
        found.problems.append(with_smallest_change(config, shape, named_bytes, problem))
    elif gpu_bytes and (problem := memory_problem(config, state, gpu_bytes)) is not None:
        found.absent.append(with_smallest_change(config, shape, gpu_bytes, problem))
    elif shape is not None:
        _look_at_estimate(config, shape, found, named_bytes, gpu_bytes)
    if is_here and (problem := host_problem(config, state, psutil.virtual_memory().total)) is not None:
        found.absent.append(problem)


def _look_at_estimate(
    config: RunConfig, shape: DecoderShape, found: Preflight, named_bytes: float | None, gpu_bytes: float
) -> None:
    """Add problems from the estimate, for the GPU that the config names or the GPUs of this machine."""
    found.device_bytes = named_bytes or gpu_bytes or None
    if named_bytes:
        found.problems += fit_problems(config, shape, named_bytes)
        found.notes += fit_remarks(config, shape, named_bytes)
    if gpu_bytes and gpu_bytes != named_bytes:
        found.absent += fit_problems(config, shape, gpu_bytes)
        found.notes += fit_remarks(config, shape, gpu_bytes)


def _gpu_bytes() -> float:
    """Memory of this machine's largest GPU; 0 if there is none or the driver does not report it."""
    command = shutil.which("nvidia-smi")
    if not count_gpus() or command is None:
        return 0.0
    arguments = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(arguments, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
        return max(float(line) for line in said.splitlines()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0
