"""Predicts duration and cost of a run before it starts, by simulating the config's GPUs and split.

The simulation is in plan.py; other splits are compared by `areal-like simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.decoder_shape import DecoderShape
from areal_like.device_names import names_gpu
from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import gpu_named, model_of_shape
from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.config.validation.pool_sizes import gpus_of_run, gpus_of_worker
from controller.data.forced_lengths import forced_lengths
from controller.simulate import plan

NUM_STEPS = 10
"""Number of simulated steps; the rest is extrapolated."""
CHEAP_SAMPLES = 20_000
"""A job with more samples in NUM_STEPS is simulated for fewer steps, with whole groups as leases."""


@dataclass(frozen=True)
class Forecast:
    """Predicted duration of a run. lengths: the assumed lengths of answers."""

    step_s: float
    hours: float
    gpus: int
    gpu: str
    lengths: str
    trainer_wait_share: float
    rollout_idle_share: float

    @property
    def gpu_hours(self) -> float:
        """Total GPU-hours."""
        return self.hours * self.gpus


def forecast(config: RunConfig, shape: DecoderShape, lengths: Lengths | None = None) -> Forecast:
    """Simulate the start of a run on `hardware.gpu`. Raises UserError if it cannot be simulated.

    lengths: lengths of answers; None: the config's forced lengths, else log-normal with a third of the maximum as mean.
    """
    if not all(names_gpu(device) for device in (config.trainer.device, config.rollout.engine.device)):
        raise UserError(
            "the engine and the trainer must both run on GPUs",
            where="rollout.engine.device, trainer.device",
            remedy="use the costs measured in one of your runs with areal-like simulate CONFIG --calibrate RUN",
        )
    if config.hardware.gpu is None:
        raise UserError(
            "no GPU model is specified", where="hardware.gpu", remedy="set, for example, hardware.gpu: h100"
        )
    if shape.experts > 1:
        raise UserError(
            "the speed of mixture-of-experts models cannot be predicted",
            where="model.path",
            remedy="use the costs measured in one of your runs with areal-like simulate CONFIG --calibrate RUN",
        )
    tp = gpus_of_worker(config)
    setup = plan.Setup(
        config=config,
        lengths=lengths or assumed_lengths(config),
        num_steps=max(3, min(NUM_STEPS, config.num_steps, CHEAP_SAMPLES // config.samples_per_step)),
        gpu=gpu_named(config.hardware.gpu, "hardware.gpu"),
        model=model_of_shape(config.model.path or "model", shape),
        gpus=int(gpus_of_run(config)),
        tp=tp,
        by_group=config.samples_per_step * NUM_STEPS > CHEAP_SAMPLES or None,
        split=(config.rollout.num_workers * tp, config.trainer.ranks),
    )
    outcome = plan.simulate(setup).outcome
    return Forecast(
        outcome.step_s, outcome.step_s * config.num_steps / 3600, setup.gpus, config.hardware.gpu, setup.lengths.name,
        outcome.trainer_wait_share, outcome.rollout_idle_share,
    )  # fmt: skip


def assumed_lengths(config: RunConfig) -> Lengths:
    """The config's forced lengths, else an estimate from the maximum length."""
    if (forced := forced_lengths(config)) is not None:
        return forced.lengths
    cap = config.sampling.max_new_tokens
    return Lengths(f"log-normal {cap // 3}", mean=cap / 3, cap=cap)
