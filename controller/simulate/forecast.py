"""How long a run takes and what it costs, before it starts: the simulator on the GPUs and the split that a config has.

Owns: `forecast` and its words. Refuses: simulating (plan.py), looking for other splits (`areal-like simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.decoder_shape import DecoderShape
from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import gpu_named, model_of_shape
from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.config.validation.pool_sizes import gpus_of_run, gpus_of_worker
from controller.data.forced_lengths import forced_lengths
from controller.simulate import plan

NUM_STEPS = 10
"""Simulated; the rest goes on as these."""
CHEAP_SAMPLES = 20_000
"""A job of more samples than this in NUM_STEPS is simulated for fewer steps, with whole groups as the unit of work."""


@dataclass(frozen=True)
class Forecast:
    """What a run would take, by the simulator. lengths: of answers, as they were assumed."""

    step_s: float
    hours: float
    gpus: int
    gpu: str
    lengths: str
    trainer_wait_share: float
    rollout_idle_share: float

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs together."""
        return self.hours * self.gpus


def forecast(config: RunConfig, shape: DecoderShape, lengths: Lengths | None = None) -> Forecast:
    """Simulate the start of a run on `hardware.gpu`. Raises UserError where it cannot be simulated.

    lengths: of answers; None: those that the config forces, else log-normal with a third of the longest as mean.
    """
    if not all(device.startswith("cuda") for device in (config.trainer.device, config.rollout.engine.device)):
        raise UserError(
            "engine and trainer are not both on GPUs",
            remedy="areal-like simulate CONFIG --calibrate RUN takes the costs of a run of yours",
        )
    if config.hardware.gpu is None:
        raise UserError("the GPU is not named", where="hardware.gpu", remedy="hardware.gpu: h100")
    if shape.experts > 1:
        raise UserError("speeds of mixtures of experts are not modelled", where="model.path")
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
    """Those that the config forces, else a guess from the longest answer."""
    if (forced := forced_lengths(config)) is not None:
        return forced.lengths
    cap = config.sampling.max_new_tokens
    return Lengths(f"log-normal {cap // 3}", mean=cap / 3, cap=cap)
