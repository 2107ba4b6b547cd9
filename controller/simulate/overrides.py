"""Converts the best plan to settings of the config, for the YAML file or the command line.

The plan is chosen in plan.py; memory is estimated in config/memory/.
"""

from __future__ import annotations

from controller.config.backends import backend_of
from controller.config.engines import REGISTERED, configured_engine
from controller.config.launchers import launcher_of
from controller.config.memory.estimate import shape_of_run
from controller.config.memory.fit import lacks
from controller.config.run_config import RunConfig
from controller.simulate import plan


def overrides_of(trial: plan.Trial) -> list[str]:
    """`key=value` for every difference between the plan's machines and varied keys and the given config.

    Empty with measured costs, because the machines are then the config's own. In `mode: sync`, in which each phase uses
    all GPUs, engines and trainer share them.
    """
    setup, config = trial.setup, trial.setup.config
    varied = [f"{key}={value}" for key, value in trial.varied.items() if key not in plan.MACHINE_KEYS]
    if setup.gpu is None:
        return varied
    tp = setup.rollout_gpus_each
    is_shared = config.mode == "sync" and setup.split is None
    wanted: list[tuple[str, object, object]] = [
        ("hardware.gpu", config.hardware.gpu, setup.gpu.name),
        ("placement", config.placement, "colocated" if is_shared else "disaggregated"),
        ("rollout.num_workers", config.rollout.num_workers, trial.num_workers),
        ("rollout.engine.device", config.rollout.engine.device, "cuda"),
        ("trainer.ranks", config.trainer.ranks, trial.trainer_gpus),
        ("trainer.device", config.trainer.device, _trainer_device(config, trial.num_workers * tp, is_shared)),
    ]
    if configured_engine(config).devices_per_worker(config.rollout.engine) != tp:
        wanted += [(key, None, value) for key, value in _engine_settings(config, tp).items()]
    backend = backend_of(config)
    if trial.trainer_gpus > 1 and backend.max_ranks == 1:
        wanted.append(("trainer.backend", config.trainer.backend, "fsdp"))
    if (
        is_shared
        and trial.trainer_gpus > 1
        and (backend.max_ranks == 1 or not backend.releases_devices(config.trainer))
    ):
        wanted.append(("trainer.fsdp.cpu_offload", None, "true"))
    return varied + [f"{key}={value}" for key, present, value in wanted if present != value]


def _engine_settings(config: RunConfig, devices: int) -> dict[str, str]:
    """Settings for workers with the given number of GPUs: of the configured engine, else of the first engine that
    supports it.
    """
    own = configured_engine(config).settings_for_devices(devices)
    if own is not None:
        return own
    able = ((name, engine.settings_for_devices(devices)) for name, engine in REGISTERED.items())
    return next(({"rollout.engine.kind": name, **found} for name, found in able if found is not None), {})


def _trainer_device(config: RunConfig, first_free: int, is_shared: bool) -> str:
    return "cuda" if is_shared or launcher_of(config).chooses_gpus else f"cuda:{first_free}"


def unfit_words(trial: plan.Trial, config: RunConfig) -> list[str]:
    """Why the plan does not fit its GPUs by the memory estimate. config: with the plan's overrides."""
    shape = shape_of_run(config, None)
    if trial.setup.gpu is None or shape is None:
        return []
    return [lack.words for lack in lacks(config, shape, trial.setup.gpu.memory)]
