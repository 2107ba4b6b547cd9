"""Replaces `device: auto` in a RunConfig that is being built, and assigns GPUs of one machine to rollout workers.

`auto` is `cuda` where the pool has usable GPUs, else `cpu`:

    one machine   the trainer takes the first free GPUs, the rollout workers the next ones; a pool for which not enough
                  are left is on CPUs. Only with placement: colocated they share GPUs.
    a cluster     what the configuration reserves: launch.ray.POOL.gpus, rollout.pool_gpus
    emulation     CPUs

The warm start is on the trainer's first device. See docs/decisions/0125-device-auto.md.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from areal_like.device_names import AUTO, index_of
from areal_like.errors import UserError
from controller.config import machine_gpus
from controller.config.engines import engine_of
from controller.config.launchers import launcher_of
from controller.config.run_settings import RunSettings


@dataclass(frozen=True)
class Devices:
    """Devices of trainer and engine, as in their settings."""

    trainer: str
    engine: str


def choose_devices(config: RunSettings) -> Devices:
    """Devices of a config in which at least one may be `auto`. A device that is named is left unchanged."""
    named = Devices(config.trainer.device, config.rollout.engine.device)
    if AUTO not in (named.trainer, named.engine):
        return named
    try:
        chosen = _choose(config)
    except UserError:  # an unknown engine or launcher, which validation reports
        chosen = Devices("cpu", "cpu")
    trainer = chosen.trainer if named.trainer == AUTO else named.trainer
    return Devices(trainer, chosen.engine if named.engine == AUTO else named.engine)


def _choose(config: RunSettings) -> Devices:
    """What `auto` means for each of the two. A device that is named may be replaced."""
    launcher = launcher_of(config)
    if config.emulation is not None:
        return Devices("cpu", "cpu")
    if not launcher.is_one_machine:
        has_pool_gpus = config.rollout.pool_gpus is not None
        return Devices(_reserved(config, "trainer", False), _reserved(config, "rollout", has_pool_gpus))
    num_gpus = machine_gpus.usable_gpus()
    if not num_gpus:
        return Devices("cpu", "cpu")
    return _shared(config, num_gpus) if config.is_colocated else _separate(config, num_gpus)


def _reserved(config: RunSettings, pool: str, default: bool) -> str:
    """The device of a pool on a cluster, by what the configuration reserves for it."""
    settings = launcher_of(config).pool(config.launch, pool)
    gpus = settings.gpus if settings is not None else None
    return "cuda" if (default if gpus is None else gpus > 0) else "cpu"


def _shared(config: RunSettings, num_gpus: int) -> Devices:
    """Devices with `placement: colocated`: both the same."""
    for device in (config.trainer.device, config.rollout.engine.device):
        if device != AUTO:
            return Devices(device, device)
    width = engine_of(config).devices_per_worker(config.rollout.engine)
    fits = max(config.trainer.ranks, config.rollout.num_workers * width) <= num_gpus
    return Devices(*(("cuda", "cuda") if fits else ("cpu", "cpu")))


def _separate(config: RunSettings, num_gpus: int) -> Devices:
    """Devices of a run in which trainer and engines never share a GPU."""
    ranks, trainer, engine = config.trainer.ranks, config.trainer.device, config.rollout.engine.device
    workers, width = config.rollout.num_workers, engine_of(config).devices_per_worker(config.rollout.engine)
    is_one_gpu = workers * width == 1
    if trainer == AUTO:
        is_spread = engine == "cuda" and not is_one_gpu  # these workers leave out the trainer's GPUs
        (first,) = first_gpus(1, ranks, set() if is_spread else _gpus(engine, width))
        fits = first + ranks <= num_gpus
        if fits and is_spread:
            fits = first_gpus(workers, width, range(first, first + ranks))[-1] + width <= num_gpus
        trainer = f"cuda:{first}" if fits else "cpu"
    if engine == AUTO:
        firsts = first_gpus(workers, width, _gpus(trainer, ranks))
        fits = firsts[-1] + width <= num_gpus
        engine = (f"cuda:{firsts[0]}" if is_one_gpu else "cuda") if fits else "cpu"
    return Devices(trainer, engine)


def first_gpus(count: int, width: int, taken: Collection[int]) -> list[int]:
    """Index of the first GPU of each of `count` workers, which have `width` GPUs in a row that are not taken.

    Example:
        >>> first_gpus(2, 2, {0, 3})
        [1, 4]
    """
    firsts: list[int] = []
    index = 0
    while len(firsts) < count:
        is_free = not set(taken) & set(range(index, index + width))
        if is_free:
            firsts.append(index)
        index += width if is_free else 1
    return firsts


def _gpus(device: str, size: int) -> set[int]:
    """GPUs of `size` processes, or of one with so many, from this device upwards; empty for `auto` and CPUs."""
    first = None if device == AUTO else index_of(device)
    return set() if first is None else set(range(first, first + size))
