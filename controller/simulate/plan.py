"""Simulates one or many jobs: a config on assumed machines, varied in a sweep, and compared.

`Setup` is a config with machines. Events are in world.py, drawing in picture.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import Gpu, Model
from areal_like.emulation.roofline import Costs, Efficiencies, Measured, Roofline, smallest_tp
from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.coordinator.replay_buffer import ReplayLimits
from controller.simulate.job import Job, Outcome
from controller.simulate.world import World

MACHINE_KEYS = ("gpus", "rollout_share", "tp")
"""Names that a sweep can vary in addition to keys of the config."""


@dataclass(frozen=True)
class Setup:
    """What is simulated."""

    config: RunConfig
    lengths: Lengths
    num_steps: int
    gpu: Gpu | None = None
    """None: `measured` costs, on the config's own workers."""
    model: Model | None = None
    gpus: int = 8
    rollout_share: float = 0.75
    """Share of the GPUs for rollout, in modes with separate GPUs; in `sync` each phase uses all."""
    split: tuple[int, int] | None = None
    """GPUs of rollout and of the trainer; None: determined by rollout_share."""
    tp: int | None = None
    """GPUs of one rollout worker; None: as many as the weights require."""
    reached: Efficiencies = field(default_factory=Efficiencies)
    measured: Measured | None = None
    prompt_tokens: int = 200
    reward_s: float = 0.0
    by_group: bool | None = None
    """See Job."""

    @property
    def rollout_gpus_each(self) -> int:
        """GPUs of one rollout worker."""
        assert self.gpu is not None
        assert self.model is not None
        return self.tp or smallest_tp(self.gpu, self.model)


@dataclass(frozen=True)
class Trial:
    """One simulated variant."""

    varied: Mapping[str, str]
    setup: Setup
    outcome: Outcome
    num_workers: int
    trainer_gpus: int
    wall_s: float
    """Duration of the simulation."""


def simulate(setup: Setup, varied: Mapping[str, str] | None = None) -> Trial:
    """Simulate one setup. Raises UserError if the job does not fit the machines."""
    job = job_of(setup)
    if setup.measured is not None:  # on a measured machine workers report as often as in the measured run
        job = replace(job, heartbeat_s=setup.config.launch.heartbeat_s)
    costs, num_workers, trainer_gpus = machines_of(setup)
    held = setup.config.worker_capacity
    began_s = time.monotonic()
    outcome = World(job, costs, num_workers, held=held).run()
    return Trial(varied or {}, setup, outcome, num_workers, trainer_gpus, time.monotonic() - began_s)


def job_of(setup: Setup) -> Job:
    """The job of the config, extended after `num_steps` by the steps that generation runs ahead.

    The last steps are not counted: no generation is left for them, which would favour asynchrony.
    """
    config, buffer = setup.config, setup.config.replay_buffer
    bound = config.staleness.bound
    ahead = max(1, setup.num_steps // 5) if bound is None else bound
    return Job(
        groups_per_step=config.groups_per_step,
        group_size=config.group_size,
        num_steps=setup.num_steps + ahead,
        num_tail_steps=ahead,
        lengths=replace(setup.lengths, cap=config.sampling.max_new_tokens),
        prompt_tokens=setup.prompt_tokens,
        mode=config.mode,
        max_staleness=config.staleness.bound,
        on_stale=config.staleness.on_stale,
        interruption=config.rollout.interruption,
        updates_per_step=config.trainer.passes_per_batch * config.trainer.mini_batches,
        passes_per_batch=config.trainer.passes_per_batch if setup.measured is None else 1,
        replay=None if buffer is None or setup.measured is not None else ReplayLimits(**buffer.model_dump()),
        reward_s=setup.reward_s,
        seed=config.seed,
        routing=config.rollout.routing.policy,
        affinity=config.rollout.routing.affinity,
        migration=config.rollout.routing.migration,
        min_gain_s=config.rollout.routing.min_gain_s,
        by_group=setup.by_group,
    )


def machines_of(setup: Setup) -> tuple[Costs, int, int]:
    """Costs, number of rollout workers, GPUs of the trainer. Raises UserError."""
    config = setup.config
    if setup.measured is not None:
        return setup.measured, config.rollout.num_workers, 1
    assert setup.gpu is not None
    assert setup.model is not None
    tp = setup.rollout_gpus_each
    rollout_gpus, trainer_gpus = _split(setup, tp)
    if setup.model.weight_bytes / tp > 0.8 * setup.gpu.memory:
        raise UserError(
            f"{setup.model.name} has {setup.model.weight_bytes / 1e9:.0f} GB of weights, which do not fit in the "
            f"{tp * setup.gpu.memory / 1e9:.0f} GB of {tp} {setup.gpu.name} together with all other data",
            where="--tp",
            remedy="use more GPUs per worker, or GPUs with more memory",
        )
    costs = Roofline(
        setup.gpu, setup.model, tp, trainer_gpus, setup.reached,
        is_recomputing_logprobs=config.trainer.loss.proximal in ("recompute", "version"),
        is_recomputing_activations=config.trainer.gradient_checkpointing,
        slots=config.rollout.engine.num_slots,
    )  # fmt: skip
    return costs, rollout_gpus // tp, trainer_gpus


def _split(setup: Setup, tp: int) -> tuple[int, int]:
    if setup.split is not None:
        return setup.split
    if setup.config.mode == "sync":
        rollout, trainer = setup.gpus // tp * tp, setup.gpus
    else:
        rollout = round(setup.gpus * setup.rollout_share / tp) * tp
        trainer = setup.gpus - rollout
    if rollout < tp or trainer < 1:
        raise UserError(
            f"{setup.gpus} GPUs cannot be split into {rollout} for rollout ({tp} per worker) and {trainer} for "
            "training",
            where="--gpus",
            remedy="use more GPUs, a different --rollout-share, or a smaller --tp",
        )
    return rollout, trainer


# ------------------------------------------------------------ sweeps


def sweep(
    make: Callable[[tuple[str, ...]], Setup], variants: Sequence[tuple[str, Sequence[str]]],
    tell: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:  # fmt: skip
    """Simulate every combination of the values. make: makes the setup with further `key=value` overrides. Raises
    UserError.
    """
    trials = []
    for values in itertools.product(*(choices for _, choices in variants)):
        varied = dict(zip((key for key, _ in variants), values, strict=True))
        changed = make(tuple(f"{key}={value}" for key, value in varied.items() if key not in MACHINE_KEYS))
        for key in MACHINE_KEYS:
            if key in varied:
                changed = _with_machine(changed, key, varied[key])
        trials.append(simulate(changed, varied))
        tell(trials[-1])
    return trials


def _with_machine(setup: Setup, key: str, text: str) -> Setup:
    try:
        if key == "rollout_share":
            share = float(text)
            if not 0 < share < 1:
                raise ValueError
            return replace(setup, rollout_share=share)
        number = int(text)
        if number < 1:
            raise ValueError
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a valid value",
            where=f"--sweep {key}",
            remedy="use numbers between 0 and 1, separated by commas"
            if key == "rollout_share"
            else "use whole numbers greater than 0, separated by commas",
        ) from error
    return replace(setup, gpus=number) if key == "gpus" else replace(setup, tp=number)


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse `key=a,b,c`. Raises UserError."""
    key, _, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not key or not found:
        raise UserError(
            f"{text!r} specifies no values",
            where="--sweep",
            remedy="write, for example, --sweep staleness.max_staleness=0,2,8",
        )
    return key.strip(), found


def best(trials: Sequence[Trial]) -> Trial:
    """The trial with the lowest mean staleness of those within 2 % of the most samples per second."""
    top = max(trial.outcome.samples_per_s for trial in trials)
    near = [trial for trial in trials if trial.outcome.samples_per_s >= 0.98 * top]
    return min(near, key=lambda trial: (trial.outcome.staleness_mean, -trial.outcome.samples_per_s))
