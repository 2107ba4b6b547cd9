"""Finds what does not fit on a GPU by the estimate, and the smallest change that makes it fit.

The estimate is in estimate.py. The check of the trainer's state alone, which is exact, is in trainer_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from areal_like.decoder_shape import DecoderShape
from areal_like.device_names import names_gpu
from controller.config.backends import REGISTERED, backend_of, num_replicas, with_replicas
from controller.config.engines import engine_job, engine_of
from controller.config.launchers import launcher_of
from controller.config.memory.estimate import ProcessMemory, estimate, rollout_memory, trainer_memory
from controller.config.problems import Problem
from controller.config.run_config import RunConfig, TrainerSettings
from controller.run_folder.units import size_text

ESTIMATE_ERROR = 0.15
"""Maximum relative error of an estimate; `python -m benchmarks.memory` measured less on CPUs."""
CONTEXT_BYTES = 1.5e9
"""Memory of a GPU for the CUDA context and the buffers of NCCL. Assumed, not measured."""
MOST_RANKS = 512
SMALLEST_MICRO_BATCH = 4
"""Micro-batches are reduced by at most this factor before other changes are tried."""


@dataclass(frozen=True)
class Lack:
    """A process whose device has too little memory."""

    process: ProcessMemory
    needed_bytes: float
    device_bytes: float

    @property
    def is_certain(self) -> bool:
        """Return whether more than the estimate's error is missing."""
        return self.needed_bytes * (1 - ESTIMATE_ERROR) > self.device_bytes

    @property
    def words(self) -> str:
        """Text with the required and the available memory."""
        largest = sorted(self.process.parts.items(), key=lambda part: -part[1])[:3]
        listed = ", ".join(f"{name} {size_text(num_bytes)}" for name, num_bytes in largest)
        return (
            f"{self.process.name}: an estimated {size_text(self.needed_bytes)} of a GPU's"
            f" {size_text(self.device_bytes)} ({listed}, ...)"
        )


def needed_on_device(process: ProcessMemory) -> float:
    """Bytes of a GPU that the process requires."""
    return process.needed_bytes + CONTEXT_BYTES


def lacks(config: RunConfig, shape: DecoderShape, device_bytes: float) -> list[Lack]:
    """Processes that need more than their device has, by the estimate. Empty on emulated devices and on CPUs."""
    if config.emulation is not None:
        return []
    found = estimate(config, shape, device_bytes)
    judged: list[ProcessMemory] = []
    if names_gpu(config.trainer.device) and not backend_of(config).adapts_to_memory:
        judged += found.trainer
    if names_gpu(config.rollout.engine.device):
        judged.append(found.rollout)
    if len(judged) > 1 and _share_devices(config):
        judged = [_together(judged)]
    wanted = [Lack(process, needed_on_device(process), device_bytes) for process in judged]
    return [lack for lack in wanted if lack.needed_bytes > device_bytes]


def _share_devices(config: RunConfig) -> bool:
    """Return whether engine and trainer hold memory of one GPU at the same time."""
    if config.is_colocated or launcher_of(config).chooses_gpus:
        return False
    engines, ranks = ({device if ":" in device else f"{device}:0" for device in devices}
                      for devices in (config.rollout_devices, config.trainer_devices))  # fmt: skip
    return bool(engines & ranks)


def _together(processes: list[ProcessMemory]) -> ProcessMemory:
    """The rank with the largest memory and a worker on one GPU."""
    *ranks, worker = processes
    rank = max(ranks, key=lambda process: process.needed_bytes)
    parts = {f"{one.pool}: {part}": size for one in (rank, worker) for part, size in one.parts.items()}
    needed_bytes = rank.needed_bytes + worker.needed_bytes
    return ProcessMemory("trainer and rollout worker on one GPU", 1, parts, needed_bytes, pool="both")


def fit_problems(config: RunConfig, shape: DecoderShape, device_bytes: float) -> Iterator[Problem]:
    """Processes that cannot fit, even if the estimate is too high by its error."""
    for lack in lacks(config, shape, device_bytes):
        if lack.is_certain:
            yield Problem(_keys(lack), lack.words, smallest_change(config, shape, device_bytes, lack))


def fit_remarks(config: RunConfig, shape: DecoderShape, device_bytes: float) -> Iterator[str]:
    """Processes that may not fit: less than the estimate's error is missing."""
    for lack in lacks(config, shape, device_bytes):
        if not lack.is_certain:
            change = smallest_change(config, shape, device_bytes, lack)
            yield f"memory: {lack.words}; estimates are off by up to {ESTIMATE_ERROR:.0%} -> {change}"


def _keys(lack: Lack) -> tuple[str, ...]:
    if lack.process.pool != "rollout":
        return ("trainer.micro_batch_tokens", "trainer.ranks", "trainer.backend", "model.path")
    return ("rollout.engine", "rollout.engine.num_slots", "model.path")


def with_smallest_change(
    config: RunConfig, shape: DecoderShape | None, device_bytes: float | None, problem: Problem
) -> Problem:
    """Add to a problem of the trainer's state alone the change with which everything fits, if it is known."""
    if shape is None or device_bytes is None:
        return problem
    for lack in lacks(config, shape, device_bytes):
        if lack.process.pool != "rollout":
            return replace(problem, remedy=smallest_change(config, shape, device_bytes, lack))
    return problem


# ------------------------------------------------------------ the smallest change


def smallest_change(config: RunConfig, shape: DecoderShape, device_bytes: float, lack: Lack) -> str:
    """The cheapest change with which the process fits. Changes are tried in order of their cost."""
    if lack.process.pool == "both":
        return (
            "set placement: colocated with mode: sync (trainer and engine then take turns), or use a separate GPU for "
            "each"
        )
    is_trainer = lack.process.pool == "trainer"
    changes = _trainer_changes(config, shape) if is_trainer else _rollout_changes(config, shape)
    for words, processes in changes:
        if all(needed_on_device(process) <= device_bytes for process in processes(device_bytes)):
            return f"set {words}"
    return "use a smaller model, or a GPU with more memory"


Processes = Callable[[float], tuple[ProcessMemory, ...]]
"""Memory that the processes would need, given the memory of a device."""


def _rollout_changes(config: RunConfig, shape: DecoderShape) -> Iterator[tuple[str, Processes]]:
    for words, engine in engine_of(config).memory_settings(engine_job(config)):
        rollout = config.rollout.model_copy(update={"engine": engine})
        changed = config.model_copy(update={"rollout": rollout})
        yield words, lambda device_bytes, changed=changed: (rollout_memory(changed, shape, device_bytes),)  # type: ignore[misc]


def _trainer_changes(config: RunConfig, shape: DecoderShape) -> Iterator[tuple[str, Processes]]:
    """Smaller micro-batches, gradient checkpointing, both; then fewer replicas with both; then more ranks with both;
    then state in host memory."""
    for words, settings in trainer_settings(config):
        changed = config.model_copy(update={"trainer": settings})
        yield words, lambda _, changed=changed: trainer_memory(changed, shape)  # type: ignore[misc]


def trainer_settings(config: RunConfig) -> Iterator[tuple[str, TrainerSettings]]:
    """Settings that need less memory, with a description, smallest change first."""
    trainer, longest = config.trainer, config.rollout.engine.max_context
    small, small_words = trainer, ""
    tokens = trainer.micro_batch_tokens // 2
    while tokens >= max(longest, trainer.micro_batch_tokens // SMALLEST_MICRO_BATCH):
        small = trainer.model_copy(update={"micro_batch_tokens": tokens})
        small_words = f"trainer.micro_batch_tokens: {tokens}"
        yield small_words, small
        tokens //= 2
    lean, lean_words = small, small_words
    if not trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing: true", trainer.model_copy(update={"gradient_checkpointing": True})
        lean = small.model_copy(update={"gradient_checkpointing": True})
        lean_words = " and ".join(filter(None, (small_words, "trainer.gradient_checkpointing: true")))
        yield lean_words, lean
    backend = backend_of(config)
    spread, prefix = trainer, ""
    if backend.max_ranks == 1:
        spread, prefix = trainer.model_copy(update={"backend": "fsdp"}), "trainer.backend: fsdp and "
        lean = lean.model_copy(update={"backend": "fsdp"})
    for replicas in range(num_replicas(trainer) - 1, 0, -1):
        if trainer.ranks % replicas == 0:
            words = f"trainer.fsdp.replicas: {replicas}"
            yield words, with_replicas(trainer, replicas)
            if lean_words:
                yield f"{words} and {lean_words}", with_replicas(lean, replicas)
    ranks = trainer.ranks * 2
    while ranks <= MOST_RANKS:
        words = f"{prefix}trainer.ranks: {ranks}"
        yield words, spread.model_copy(update={"ranks": ranks})
        if lean_words:
            yield f"{words} and {lean_words}", lean.model_copy(update={"ranks": ranks})
        ranks *= 2
    sharding = REGISTERED.get(lean.backend, backend)
    if (offloaded := sharding.offloaded(lean)) is not None and sharding.section:
        more = f" and {lean_words}" if lean_words else ""
        yield f"{prefix}trainer.{sharding.section}.cpu_offload: true{more}", offloaded
