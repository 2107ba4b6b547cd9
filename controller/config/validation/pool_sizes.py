"""Sizes of the pools in processes, GPUs and CPUs, and whether one machine has enough. Pure.

Used by `validate` and by launchers. Placement is decided by the launchers.

    workers of a pool = its GPUs / GPUs of one worker (from its engine), or its CPUs / compute threads of one
    GPUs of a run     = rollout + trainer, or the larger of the two if they are colocated
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areal_like.device_names import names_gpu, resolved
from controller.config.engines import as_problems, configured_engine, engine_job, engine_of
from controller.config.launchers import launcher_of
from controller.config.problems import Problem
from controller.config.run_config import RunConfig


@dataclass(frozen=True)
class PoolSize:
    """One pool: a number of processes, and the resources of each."""

    name: str
    num_processes: int
    gpus_each: float
    cpus_each: float

    @property
    def gpus(self) -> float:
        """num_processes * gpus_each"""
        return self.num_processes * self.gpus_each

    @property
    def cpus(self) -> float:
        """num_processes * cpus_each"""
        return self.num_processes * self.cpus_each

    @property
    def words(self) -> str:
        """`7 workers x 1 GPU`"""
        kind = {"rollout": "worker", "trainer": "rank", "reward": "service"}[self.name]
        device = units(self.gpus_each, "GPU") if self.gpus_each else units(self.cpus_each, "CPU")
        return f"{self.num_processes} {kind}{'s' * (self.num_processes > 1)} x {device}"


def units(count: float, name: str) -> str:
    """`1 GPU`, `2.5 CPUs`"""
    return f"{count:g} {name}{'s' * (count != 1)}"


def gpus_of_worker(config: RunConfig) -> int:
    """GPUs of one rollout worker: 0 on a CPU."""
    engine = config.rollout.engine
    if not names_gpu(engine.device):
        return 0
    return configured_engine(config).devices_per_worker(engine)


def _set_aside(config: RunConfig, pool: str, resource: str, default: float) -> float:
    """Resources of one process of a pool: what the launcher reserves for it, if given."""
    reserved = launcher_of(config).pool(config.launch, pool)
    given = getattr(reserved, resource) if reserved else None
    return default if given is None else float(given)


def pool_sizes(config: RunConfig) -> list[PoolSize]:
    """The pools of a run. A thread count left to the program counts as one: it uses the available cores."""
    threads = {
        "rollout": config.rollout.threads if isinstance(config.rollout.threads, int) else 1,
        "trainer": config.trainer.threads if isinstance(config.trainer.threads, int) else 1,
    }
    trainer_gpus = 1 if names_gpu(config.trainer.device) else 0
    num_services = 0 if config.reward.addresses or not config.reward.scorers else config.reward.num_services
    pools = (
        ("rollout", config.rollout.num_workers, gpus_of_worker(config), threads["rollout"]),
        ("trainer", config.trainer.ranks, trainer_gpus, threads["trainer"]),
        ("reward", num_services, 0, config.reward.num_workers),
    )
    return [
        PoolSize(name, count, _set_aside(config, name, "gpus", gpus), _set_aside(config, name, "cpus", cpus))
        for name, count, gpus, cpus in pools
        if count
    ]


def gpus_of_run(config: RunConfig) -> float:
    """All GPUs that a run requires."""
    gpus = [pool.gpus for pool in pool_sizes(config)]
    return max(gpus) if config.is_colocated else sum(gpus)


def fit_problem(config: RunConfig, num_gpus: int) -> Problem | None:
    """Reason why the run does not fit on a machine with so many GPUs, in one sentence; None if it does, or may.

    Devices named individually (`cuda:3`) may be shared on purpose, so only pools that are counted are checked.
    """
    wanted = gpus_of_run(config)
    if wanted <= num_gpus or resolved(config.rollout.engine.device) != "cuda":
        return None
    pools = {pool.name: pool for pool in pool_sizes(config) if pool.gpus}
    listed = "; ".join(f"{name}: {pool.words}" for name, pool in pools.items())
    shared = ", on the same GPUs" if len(pools) > 1 and config.is_colocated else ""
    rest = num_gpus if config.is_colocated else num_gpus - sum(p.gpus for n, p in pools.items() if n != "rollout")
    most = max(0, rest) // pools["rollout"].gpus_each
    fewer_workers = f"set rollout.num_workers: {most:g}"
    if config.is_colocated:
        fits = {name: pool.gpus <= num_gpus for name, pool in pools.items()}
        changes = [fewer_workers] if most and not fits["rollout"] else []
        changes += ["reduce trainer.ranks"] if not fits.get("trainer", True) else []
        remedy = ", and ".join(changes) or "use a machine with more GPUs"
    else:
        shared_gpus = "placement: colocated with mode: sync"
        remedy = f"{fewer_workers}, or {shared_gpus}" if most else f"set {shared_gpus}"
    return Problem(
        ("rollout.num_workers", "trainer.ranks"),
        f"the run requires {units(wanted, 'GPU')} ({listed}{shared}), but this machine has {num_gpus}",
        remedy,
    )


def pool_problems(config: RunConfig) -> Iterator[Problem]:
    """Sizes that are impossible on any machine."""
    rollout = config.rollout
    if rollout.pool_gpus is not None and rollout.pool_cpus is not None:
        yield Problem(
            ("rollout.pool_gpus", "rollout.pool_cpus"),
            "the size of a pool can be set in GPUs or in CPUs, but not in both",
            "set only one of rollout.pool_gpus and rollout.pool_cpus",
        )
        return
    each = _set_aside(config, "rollout", "gpus", gpus_of_worker(config))
    if rollout.pool_gpus is not None and not each:
        yield Problem(
            ("rollout.pool_gpus", "rollout.engine.device"),
            f"this key sets a number of GPUs, but the workers run on {rollout.engine.device}",
            "set rollout.pool_cpus, or rollout.engine.device: cuda",
        )
    elif rollout.pool_gpus is not None and rollout.pool_gpus != each * rollout.num_workers:
        yield _mismatch(config, "rollout.pool_gpus", rollout.pool_gpus, "GPUs", each)
    threads = rollout.threads if isinstance(rollout.threads, int) else 1
    cpus = _set_aside(config, "rollout", "cpus", threads)
    if rollout.pool_cpus is not None and rollout.pool_cpus != cpus * rollout.num_workers:
        yield _mismatch(config, "rollout.pool_cpus", rollout.pool_cpus, "CPUs", cpus)


def _mismatch(config: RunConfig, key: str, size: int, unit: str, each: float) -> Problem:
    num_workers = config.rollout.num_workers
    if each == 0 or each != int(each):
        return Problem(
            (key, f"launch.{launcher_of(config).section}.rollout.{unit.lower()}"),
            f"{num_workers} workers of {each:g} {unit} need {num_workers * each:g} {unit}, not {size}",
            f"set a whole number of {unit} per worker, or remove {key} and set the size with rollout.num_workers",
        )
    each, name = int(each), unit.removesuffix("s")
    if size % each:
        fitting = [str(count) for count in (size - size % each, size + each - size % each) if count]
        what = f"{units(size, name)} cannot be divided into workers of {each} {unit}"
        return Problem((key,), what, f"use {' or '.join(fitting)}")
    return Problem(
        (key, "rollout.num_workers"),
        f"{units(size, name)} can be divided into {units(size // each, 'worker')} of {units(each, name)}, "
        f"but num_workers is {num_workers}",
        f"set only one of {key} and rollout.num_workers",
    )


def placement_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that conflict with engines and trainer on the same devices."""
    if not config.is_colocated:
        return
    trainer, engine = config.trainer, config.rollout.engine
    if config.mode != "sync":
        yield Problem(
            ("placement", "mode"),
            f"in mode {config.mode}, engines and trainer run at the same time and cannot share the same memory",
            "set mode: sync, or placement: disaggregated",
        )
    yield from as_problems(engine_of(config).colocation_problems(engine_job(config)))
    if trainer.weights.swap == "rolling":
        yield Problem(
            ("trainer.weights.swap", "placement"),
            "a rolling swap is not possible on shared devices: while the trainer runs, the engines hold no memory, and "
            "afterwards all engines load the weights at the same time",
            "set swap: together",
        )
    on_gpus = [names_gpu(device) for device in (trainer.device, engine.device)]
    if on_gpus[0] != on_gpus[1]:
        yield Problem(
            ("placement", "trainer.device", "rollout.engine.device"),
            "`colocated` requires the trainer and the engines to use the same kind of device, but the trainer is on "
            f"{trainer.device} and the engines are on {engine.device}",
            "set trainer.device and rollout.engine.device to the same kind of device, or set placement: disaggregated",
        )
