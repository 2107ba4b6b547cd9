"""Checks of this machine: folders, devices, memory for workers, ports.

Packages are checked in packages.py, memory of a model in memory.py, the machines of a cluster in
controller/launch/cluster/. torch is not imported.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from areal_like.device_names import index_of, names_cpu, names_gpu
from controller.config.engines import engine_job, engine_of
from controller.config.launchers import launcher_of
from controller.config.machine_gpus import count_gpus, is_cpu_build, torch_build
from controller.config.problems import Problem
from controller.config.run_config import RunConfig
from controller.config.validation.pool_sizes import fit_problem, gpus_of_run, units

MIN_WORKER_BYTES = 100_000_000
"""Minimum private memory of a rollout worker with any model, for torch and transformers alone."""


def folders(config: RunConfig) -> Iterator[Problem]:
    """Problems of folders that cannot be written."""
    for key, name in (("runs_dir", config.runs_dir), ("out", config.out)):
        if name is None:
            continue
        fault = _cannot_write(Path(name).expanduser())
        if fault:
            yield Problem(
                (key,),
                f"`{name}` is not writable ({fault})",
                f"make this folder writable, or choose a different one with {key}=...",
            )


def _cannot_write(folder: Path) -> str:
    """Reason why a folder, which may not exist yet, cannot be written; empty if it can."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.TemporaryDirectory(prefix=".areal_like-", dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def devices(config: RunConfig) -> Iterator[Problem]:
    """Problems of devices that the config requires and this machine lacks."""
    keys = {"rollout.engine.device": config.rollout.engine.device, "trainer.device": config.trainer.device}
    wanted = [key for key, device in keys.items() if names_gpu(device)]
    if not wanted:
        return
    build = torch_build()
    if is_cpu_build(build):
        yield Problem(
            tuple(wanted),
            f"CUDA is required, but the installed torch ({build}) is a CPU build",
            "set device: cpu, or install a CUDA build of torch",
        )
    num_gpus = count_gpus()
    if num_gpus == 0:
        yield Problem(tuple(wanted), "CUDA is required, but there is no NVIDIA GPU on this machine", "set device: cpu")
        return
    if (problem := fit_problem(config, num_gpus)) is not None:
        yield problem
        return
    for device in dict.fromkeys([*config.rollout_devices, *config.trainer_devices]):
        if (index_of(device) or 0) >= num_gpus:
            what = f"{device} is configured, but this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}"
            yield Problem(
                tuple(wanted),
                what,
                f"set rollout.num_workers: {max(1, num_gpus - 1)}, or choose an existing device (the last one is "
                f"cuda:{num_gpus - 1})",
            )


def unused_gpus(config: RunConfig) -> Iterator[str]:
    """Note about GPUs of this machine that a run does not use."""
    num_gpus, used = count_gpus(), gpus_of_run(config)
    if config.emulation is not None or used >= num_gpus:
        return
    devices = {"trainer.device": config.trainer.device, "rollout.engine.device": config.rollout.engine.device}
    on_cpu = [key for key, device in devices.items() if names_cpu(device)]
    is_shareable = len(on_cpu) == 1 and not config.is_colocated
    remedy = "; to let trainer and engines share GPUs, set placement: colocated and mode: sync" if is_shareable else ""
    yield unused_text(num_gpus - used, on_cpu) + remedy


def unused_by_one_process(device: str, key: str = "trainer.device") -> Iterator[str]:
    """Same for a run of a single process, on the device of the setting `key`."""
    if names_cpu(device) and (num_gpus := count_gpus()):
        yield unused_text(num_gpus, [key])


def ranks_without_gpus(device: str, num_ranks: int) -> Iterator[Problem]:
    """Problem of ranks of a run from files that take one GPU each from `device` upwards, if this machine has too
    few.
    """
    first, num_gpus = index_of(device), count_gpus()
    if first is None or first + num_ranks <= num_gpus:
        return
    most = num_gpus - first
    yield Problem(
        ("trainer.ranks", "trainer.device"),
        f"the run requires {units(first + num_ranks, 'GPU')} ({units(num_ranks, 'rank')}, starting at {device}), but "
        f"this machine has {num_gpus}",
        f"set trainer.ranks: {most}, or trainer.device: cpu" if most > 0 else "set trainer.device: cpu",
    )


def unused_text(unused: float, on_cpu: Sequence[str]) -> str:
    """Text about GPUs that a run does not use. on_cpu: keys of the devices that are `cpu`.

    Example:
        >>> unused_text(1, ["trainer.device"])
        '1 GPU of this machine is not used: trainer.device is cpu'
    """
    text = f"{units(unused, 'GPU')} of this machine {'is' if unused == 1 else 'are'} not used"
    if on_cpu:
        text += f": {' and '.join(on_cpu)} {'is' if len(on_cpu) == 1 else 'are'} cpu"
    if is_cpu_build(build := torch_build()):
        text += f"; the installed torch ({build}) is a CPU build"
    return text


def room_for_workers(config: RunConfig) -> Iterator[Problem]:
    """Problem of a number of workers that exceeds the memory. A typing error (1000 workers) must not crash the
    machine.
    """
    num_workers, total_bytes = config.rollout.num_workers, psutil.virtual_memory().total
    most = total_bytes // MIN_WORKER_BYTES
    if num_workers > most:
        what = f"{num_workers:,} rollout workers do not fit into the {total_bytes / 1e9:.0f} GB of this machine"
        yield Problem(
            ("rollout.num_workers",),
            what,
            f"set this key to at most {most}; more workers than cores or GPUs do not increase throughput",
        )


def ports(config: RunConfig) -> Iterator[Problem]:
    """Problems of addresses that cannot be bound."""
    launcher = launcher_of(config)
    host = launcher.host(config.launch)
    wanted = [(launcher.host_key, "launch.port", host, config.launch.port)] if host else []
    if (endpoint := config.metrics.prometheus) is not None:
        wanted.append(("metrics.prometheus.host", "metrics.prometheus.port", endpoint.host, endpoint.port))
    key, ports = engine_of(config).server_ports(engine_job(config))
    if launcher.is_one_machine:
        wanted += [(key, key, "127.0.0.1", port) for port in ports]
    for host_key, port_key, host, port in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except (OSError, OverflowError, ValueError) as error:  # ValueError: not a valid host name
            reason = getattr(error, "strerror", None) or str(error)
            key = port_key if "in use" in reason else host_key
            hint = launcher.host_hint if host_key == launcher.host_key else "127.0.0.1"
            remedy = f"set {key}: 0 to use any free port" if key == port_key else f"set {key}: {hint}"
            yield Problem((key,), f"cannot listen on {host}:{port} ({reason})", remedy)
