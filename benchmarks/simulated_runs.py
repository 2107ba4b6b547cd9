"""Compares a user's runs with the simulator's predictions, and measures the simulator's own time.

Starts no runs. Published runs are in published.py and simulator.py.

Real devices: the costs of a worker and of the trainer are linear functions fitted to the first run's own figures
(controller/simulate/calibrate.py); the other runs are predicted with them. Emulated devices: the simulator gets only
the roofline of the run's config and no measurement, so the comparison covers everything except the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.emulation.device import lengths_of, roofline_of, slots_of
from areal_like.emulation.lengths import thinking
from areal_like.emulation.machines import GPUS, MODELS
from areal_like.emulation.roofline import Roofline
from areal_like.errors import UserError
from benchmarks.steady import figures, refuse_distorted
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths
from controller.run_folder.run_folder import RunFolder
from controller.simulate.calibrate import calibrate, other_threads
from controller.simulate.job import Job
from controller.simulate.plan import Setup, job_of, simulate
from controller.simulate.world import World

Row = dict[str, Any]
EMULATED_STEPS = 60
"""Smallest number of simulated steps: emulated runs are short, and the longest answer of a step is random."""


def compare(folders: Sequence[Path], names: Sequence[str] = ()) -> list[Row]:
    """One row for every run except the one that gives the costs: the first one on real devices. Raises UserError if
    another run has other numbers of threads than that one. names: names of the runs (default: their folders' names).
    """
    rows: list[Row] = []
    source: tuple[str, Path] | None = None
    for folder, name in zip(folders, names or [folder.name for folder in folders], strict=True):
        config = load_config(str(folder)).config
        if config.emulation is not None:
            basis = "its config's roofline", partial(predicted_emulated, config)
        elif source is None:
            source = name, folder
            continue
        else:
            basis = source[0], partial(predicted_real, source[1], config)
        rows.append({"run": name, **_row(folder, config, *basis)})
    return rows


def predicted_real(source: Path, config: RunConfig) -> float:
    """Samples per second of a job on this machine, with costs and lengths from another run of it. Raises UserError."""
    run, own = RunFolder(source), load_config(str(source)).config
    if (words := other_threads(own, config)) is not None:
        raise UserError(words, where=str(source), remedy="give runs of one mode a --runs of their own")
    measured, prompt = calibrate(run, slots=own.rollout.engine.num_slots)
    lengths = parse_lengths(str(source), config.sampling.max_new_tokens)
    setup = Setup(config, lengths, config.num_steps, measured=measured, prompt_tokens=prompt)
    return simulate(setup).outcome.samples_per_s


def predicted_emulated(config: RunConfig) -> float:
    """Samples per emulated second of a job on emulated devices.

    An emulated engine takes as many answers as its memory holds at their final mean length, so the simulated worker has
    as many slots. It may still run out of cache, which the engine does not model.
    """
    emulation = config.emulation
    assert emulation is not None
    costs = replace(
        roofline_of(
            emulation, is_recomputing_activations=config.trainer.gradient_checkpointing,
            slots=config.rollout.engine.num_slots,
        ),
        is_recomputing_logprobs=config.trainer.loss.proximal == "recompute",
    )  # fmt: skip
    lengths = lengths_of(emulation, config.sampling.max_new_tokens)
    setup = Setup(config, lengths, max(config.num_steps, EMULATED_STEPS), prompt_tokens=emulation.prompt_tokens)
    job = replace(
        job_of(setup), lengths=lengths,  # the config's cap counts tokens on the wire
        min_gain_s=config.rollout.routing.min_gain_s * emulation.speedup,
        heartbeat_s=config.launch.heartbeat_s * emulation.speedup,
    )  # fmt: skip
    slots = slots_of(emulation, costs, lengths)
    held = slots + (config.rollout.queue_samples or slots)  # as rollout/worker.py joins
    return World(job, replace(costs, slots=slots), config.rollout.num_workers, held=held).run().samples_per_s


def _row(folder: Path, config: RunConfig, source: str, predict: Callable[[], float]) -> Row:
    found, emulation = figures(folder), config.emulation
    refuse_distorted(found, folder)
    measured, predicted = found["samples_per_s"], predict()
    return {
        "mode": config.mode, "max_staleness": config.staleness.bound, "seed": config.seed,
        "devices": "real" if emulation is None else f"emulated {emulation.gpu}, {emulation.speedup:g} times as fast",
        "calibrated_on": source, "predicted": predicted, "measured": measured, "error": predicted / measured - 1,
    }  # fmt: skip


def print_runs(rows: Sequence[Row]) -> None:
    """Print the comparison."""
    print(f"\n{'run':28}{'costs from':24}{'samples/s':>10}{'measured':>10}{'error':>8}")
    for row in rows:
        what = f"{row['run']} ({row['mode']}, {row['max_staleness']})"
        print(f"{what:28}{row['calibrated_on']:24}{row['predicted']:10.1f}{row['measured']:10.1f}{row['error']:+8.1%}")


# ------------------------------------------------------------ how long it takes


@dataclass(frozen=True)
class SpeedJob:
    """A job whose simulation is timed."""

    gpus: int
    model: str
    tp: int
    groups: int
    steps: int


SPEED_JOBS = (SpeedJob(512, "7b", 1, 512, 1000), SpeedJob(100_000, "32b", 8, 32_768, 10))
"""The first has the batch and the split of the paper's largest 7B job, the second about 200 times as many GPUs."""
GROUP_SIZE = 16


def speed(jobs: Sequence[SpeedJob] = SPEED_JOBS) -> list[Row]:
    """Measure wall and processor time of simulating each job in one process and one thread."""
    rows = []
    for job in jobs:
        trainer = job.gpus // 4
        workers = (job.gpus - trainer) // job.tp
        costs = Roofline(GPUS["h800"], MODELS[job.model], job.tp, trainer)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        simulated = Job(
            job.groups, GROUP_SIZE, job.steps, thinking(27_648), mode="async", max_staleness=4, on_stale="wait",
            interruption="recompute", routing="least_tokens", affinity=1.0, migration=False, min_gain_s=2.0,
            updates_per_step=4,
        )  # fmt: skip
        outcome = World(simulated, costs, workers).run()
        rows.append({
            "gpus": job.gpus, "model": job.model, "workers": workers, "steps": outcome.steps,
            "samples": job.groups * GROUP_SIZE * outcome.steps, "step_s": outcome.step_s,
            "wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s,
        })  # fmt: skip
        print(f"{job.gpus:,} GPUs, {job.model}, {outcome.steps:,} steps: {rows[-1]['wall_s']:.1f} s "
              f"({rows[-1]['cpu_s']:.1f} s of processor)", flush=True)  # fmt: skip
    return rows
