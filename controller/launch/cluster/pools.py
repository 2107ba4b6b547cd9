"""Maps processes to pools and placements, and computes the resources of each placement. Pure; ray is not imported.

Whether pools fit is determined in seating.py; placements are requested in launcher.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_like.device_names import names_gpu
from controller.config.cluster_settings import PoolSettings, Strategy
from controller.config.run_config import RunConfig
from controller.config.validation.pool_sizes import gpus_of_worker
from controller.wiring.process_specs import reward_names, threads_for, trainer_names, worker_names

PREPARE = "prepare"
"""The process that prepares the starting model; it exits before the trainer's first rank uses the same placement."""
SMALLEST_CPUS = 0.001
"""Minimum resource of a placement, because Ray rejects empty ones."""


@dataclass(frozen=True)
class Pool:
    """Placements of one kind for `members`, in this order, each with the resources `each`."""

    name: str
    members: tuple[str, ...]
    each: Mapping[str, float]
    strategy: Strategy

    @property
    def words(self) -> str:
        """Resources of one placement as text."""
        return resource_words(self.each)


def resource_words(resources: Mapping[str, float]) -> str:
    """`CPU 2, GPU 1`"""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"


def pools_of(config: RunConfig) -> list[Pool]:
    """The pools of a run, most difficult to place first."""
    ray, trainer = config.launch.ray, config.trainer
    sft = config.warm_start.sft.device if config.warm_start else "cpu"
    pools = [
        Pool(
            "trainer",
            tuple(trainer_names(config)),
            _each(ray.trainer, threads_for(config, "trainer"), 1 if names_gpu(trainer.device) or names_gpu(sft) else 0),
            ray.trainer.strategy,
        ),
        Pool(
            "rollout",
            tuple(worker_names(config)),
            _each(ray.rollout, threads_for(config, "rollout"), gpus_of_worker(config)),
            ray.rollout.strategy,
        ),
        Pool(
            "reward", tuple(reward_names(config)), _each(ray.reward, config.reward.num_workers, 0), ray.reward.strategy
        ),
    ]
    return [pool for pool in pools if pool.members]


def publish_location(name: str, pools: list[Pool]) -> tuple[str, int | None]:
    """Pool of a process, and its index in it; None: an added rollout worker without a reserved placement."""
    if name == PREPARE:
        return "trainer", 0
    for pool in pools:
        if name in pool.members:
            return pool.name, pool.members.index(name)
    assert name.startswith("rollout-"), f"{name} belongs to no pool"
    return "rollout", None


def _each(pool: PoolSettings, default_cpus: float, default_gpus: float) -> dict[str, float]:
    cpus = default_cpus if pool.cpus is None else pool.cpus
    gpus = default_gpus if pool.gpus is None else pool.gpus
    wanted = {"CPU": cpus, "GPU": gpus, **pool.resources}
    return {name: float(amount) for name, amount in wanted.items() if amount > 0} or {"CPU": SMALLEST_CPUS}
