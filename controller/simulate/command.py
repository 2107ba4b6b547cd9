"""`areal-like simulate`: simulates a config on machines that need not exist.

Converts arguments to a setup and prints the result. The simulation is in plan.py, the arguments in arguments.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import gpu_named, model_named
from areal_like.emulation.roofline import SHARES, Efficiencies, Measured
from areal_like.errors import UserError
from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths
from controller.run_folder.locate import find_run
from controller.run_folder.run_folder import RunFolder
from controller.simulate import plan
from controller.simulate.calibrate import calibrate, other_threads
from controller.simulate.forecast import assumed_lengths
from controller.simulate.job import Losses
from controller.simulate.overrides import overrides_of, unfit_words
from controller.simulate.picture import draw

DEFAULT_STEPS = 100
DEFAULT_PROMPT = 200
DEFAULT_GPU, DEFAULT_GPUS, DEFAULT_SHARE = "h800", 8, 0.75


def simulate_command(arguments: argparse.Namespace) -> int:
    """Run the requested simulations, print them, and return the exit status. Raises UserError."""
    trials = simulated(arguments, describe=not arguments.json)
    if arguments.json:
        sys.stdout.write(json.dumps([facts(trial) for trial in trials], indent=1) + "\n")
    else:
        print_trials(trials, arguments)
    if arguments.plot:
        draw(trials, Path(arguments.plot))
        if not arguments.json:
            print(f"drawn: {arguments.plot}")
    return 0


def simulated(arguments: argparse.Namespace, *, describe: bool) -> list[plan.Trial]:
    """Simulate every requested plan. Raises UserError.

    describe: first print what is simulated.
    """
    variants = [plan.parse_sweep(text) for text in arguments.sweep]
    if arguments.calibrate:
        _refuse_machines(arguments, variants)
    run = MeasuredRun(arguments.calibrate) if arguments.calibrate else None

    @functools.cache
    def make(overrides: tuple[str, ...]) -> plan.Setup:
        return setup_of(arguments, load_config(arguments.config, [*arguments.overrides, *overrides]).config, run)

    def tried(overrides: tuple[str, ...]) -> plan.Setup:
        setup = make(overrides)
        if run is not None:
            run.warn(setup.config)
        return setup

    setup = make(())
    console = Console(stderr=True, highlight=False)
    total = 1
    for _, choices in variants:
        total *= len(choices)
    if describe:
        _describe(setup)

    def tell(trial: plan.Trial) -> None:
        if total > 1 and console.is_terminal:
            console.print(f"{_varied(trial)}: {trial.outcome.step_s:.1f} s per step", end="\r")

    return plan.sweep(tried, variants, tell)


def print_trials(trials: Sequence[plan.Trial], arguments: argparse.Namespace) -> None:
    """Print the table, and the best plan as settings of the config."""
    _print(trials)
    _print_overrides(trials, arguments)


def _refuse_machines(arguments: argparse.Namespace, variants: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise UserError for machine options together with --calibrate: measured costs are those of the run's machines."""
    machine = ("gpu", "gpus", "rollout_share", "tp", "model", "efficiency")
    conflicting = [*(f"--sweep {key}" for key, _ in variants if key in plan.MACHINE_KEYS),
            *(f"--{name.replace('_', '-')}" for name in machine if getattr(arguments, name))]  # fmt: skip
    if conflicting:
        raise UserError(
            "--calibrate uses the costs measured with the run's machines and model, which these options cannot change",
            where=f"{', '.join(conflicting)} together with --calibrate",
            remedy="remove --calibrate or these options; set the number of workers with rollout.num_workers",
        )


class MeasuredRun:
    """The run given by --calibrate. Raises UserError if there is none."""

    def __init__(self, name: str) -> None:
        self.folder = RunFolder(find_run(name).root)
        self._config = load_config(str(self.folder.root)).config
        self._costs: dict[int, tuple[Measured, int]] = {}
        self._reported: set[str] = set()

    def costs(self, slots: int) -> tuple[Measured, int]:
        """Its costs for engines with the given slots, and its mean prompt. Raises UserError if it is too short."""
        if slots not in self._costs:
            self._costs[slots] = calibrate(self.folder, slots=slots)
        return self._costs[slots]

    def warn(self, config: RunConfig) -> None:
        """Print once why its costs differ from those of a job, if they do."""
        words = other_threads(self._config, config)
        if words is not None and words not in self._reported:
            self._reported.add(words)
            print(
                f"{self.folder.root}: {words}; calibrate with a run in the mode that you plan to use", file=sys.stderr
            )


def setup_of(arguments: argparse.Namespace, config: RunConfig, run: MeasuredRun | None = None) -> plan.Setup:
    """Make the setup from the arguments. Raises UserError."""
    setup = plan.Setup(
        config=config,
        lengths=_lengths(arguments.lengths or (str(run.folder.root) if run else ""), config),
        num_steps=arguments.steps or min(config.num_steps, DEFAULT_STEPS),
        prompt_tokens=arguments.prompt_tokens or DEFAULT_PROMPT,
        reward_s=arguments.reward_s,
    )
    if run is not None:
        measured, prompt = run.costs(config.rollout.engine.num_slots)
        return replace(setup, measured=measured, prompt_tokens=arguments.prompt_tokens or prompt)
    reached = Efficiencies()
    for text in arguments.efficiency:
        reached = _with_efficiency(reached, text)
    name = arguments.model or config.model.path
    if name is None:
        raise UserError(
            "the config creates a new model, whose speed cannot be predicted from the data sheet of a GPU",
            where="--model",
            remedy="choose a model, such as --model 7b, or use the costs measured in one of your runs with --calibrate "
            "RUN",
        )
    return replace(
        setup, gpu=gpu_named(arguments.gpu or config.hardware.gpu or DEFAULT_GPU), model=model_named(name),
        gpus=arguments.gpus or DEFAULT_GPUS, rollout_share=arguments.rollout_share or DEFAULT_SHARE,
        tp=arguments.tp, reached=reached,
    )  # fmt: skip


def _lengths(argument: str, config: RunConfig) -> Lengths:
    """The given lengths, else the config's forced lengths, else an estimate from the maximum length."""
    return parse_lengths(argument, config.sampling.max_new_tokens) if argument else assumed_lengths(config)


def _with_efficiency(reached: Efficiencies, text: str) -> Efficiencies:
    key, _, value = text.partition("=")
    known = asdict(reached)
    if key not in known:
        remedy = ", ".join(f"{name}={usual:g}" for name, usual in known.items())
        raise UserError(f"{text!r} is not a known efficiency", where="--efficiency", remedy=f"use one of {remedy}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    is_share = key in SHARES
    if not (0 < number <= 1 if is_share else 0 <= number < math.inf):
        what = "a fraction greater than 0 and at most 1" if is_share else "a number of seconds of at least 0"
        raise UserError(
            f"{text!r} is not {what}", where="--efficiency", remedy=f"write, for example, {key}={known[key]:g}"
        )
    return replace(reached, **{key: number})


# ------------------------------------------------------------ what is printed


def _describe(setup: plan.Setup) -> None:
    config = setup.config
    print(f"{config.groups_per_step:,} groups x {config.group_size} samples per step, {setup.num_steps:,} steps")
    mean = replace(setup.lengths, cap=config.sampling.max_new_tokens).mean_length()
    print(
        f"answer lengths: {setup.lengths.name}, {mean:,.0f} tokens on average, at most "
        f"{config.sampling.max_new_tokens:,}"
    )
    if setup.measured is not None:
        m = setup.measured
        print(
            f"measured costs: decode {m.decode_step_s * 1e3:.3g} ms + {m.decode_sequence_s * 1e6:.3g} us/sequence; "
            f"train {m.train_step_s * 1e3:.3g} ms + {m.train_token_s * 1e6:.3g} us/token"
        )
    elif setup.gpu is not None and setup.model is not None:
        reached = ", ".join(f"{key} {value:g}" for key, value in asdict(setup.reached).items())
        print(f"{setup.gpus:,} x {setup.gpu.name} for {setup.model.name}; assumed efficiencies: {reached}")
    print(
        "the simulation uses the real coordinator and a performance model of the machines; verify the "
        "result with a short run"
    )


def _varied(trial: plan.Trial) -> str:
    return "  ".join(f"{key}={value}" for key, value in trial.varied.items())


def _print(trials: Sequence[plan.Trial]) -> None:
    keys = list(trials[0].varied)
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = [*keys, "workers", "step s", "samples/s", "tokens/s", "trainer waits", "rollout idle", "prefill",
               "batch", "staleness", "hours"]  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for trial in trials:
        o = trial.outcome
        table.add_row(
            *trial.varied.values(), f"{trial.num_workers:,}", f"{o.step_s:.3g}", f"{o.samples_per_s:,.3g}",
            f"{o.tokens_per_s:,.0f}", f"{o.trainer_wait_share:.1%}", f"{o.rollout_idle_share:.1%}",
            f"{o.rollout_prefill_share:.1%}", f"{o.mean_batch:.0f}", f"{o.staleness_mean:.2f}",
            f"{o.step_s * trial.setup.config.num_steps / 3600:.2f}",
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    if len(trials) > 1:
        chosen = plan.best(trials)
        slowest = min(trial.outcome.samples_per_s for trial in trials)
        print(
            f"best: {_varied(chosen)}: {chosen.outcome.samples_per_s / slowest:.2f}x the throughput of the slowest "
            "variant; of the variants within 2 % of the fastest, this one has the lowest staleness"
        )
    else:
        print(f"staleness of the trained groups: {_histogram(trials[0].outcome.staleness)}")
    for trial in trials:
        if (losses := trial.outcome.losses) is not None:
            print(f"{_varied(trial)}: {loss_words(losses)}" if trial.varied else loss_words(losses))
    if trials[0].outcome.steps and plan.job_of(trials[0].setup).is_by_group:
        print("because of the size of this job, the simulation treats whole groups as units of work")


def loss_words(losses: Losses) -> str:
    """What dropped groups do to the lengths of trained answers."""
    mean, p99 = losses.trained_mean / losses.drawn_mean - 1, losses.trained_p99 / losses.drawn_p99 - 1
    return (
        f"{losses.share:.1%} of the answers and {losses.token_share:.1%} of their tokens are dropped because they are "
        "stale; "
        f"trained answers have {losses.trained_mean:,.0f} tokens on average, drawn ones {losses.drawn_mean:,.0f} "
        f"({mean:+.0%}); 99th percentile {losses.trained_p99:,.0f} and {losses.drawn_p99:,.0f} ({p99:+.0%})"
    )


def _print_overrides(trials: Sequence[plan.Trial], arguments: argparse.Namespace) -> None:
    """Print the best plan as settings, and whether it fits its GPUs."""
    chosen = plan.best(trials)
    settings = overrides_of(chosen)
    if not settings:
        if len(trials) > 1:
            print("settings: no changes, because the config already has the best values")
        return
    print(f"settings: {' '.join(settings)}")
    try:
        config = load_config(arguments.config, [*arguments.overrides, *settings]).config
    except UserError as error:
        print(f"with these settings, the config is invalid:\n{error}")
        return
    for words in unfit_words(chosen, config):
        print(f"the model does not fit: {words}")


def _histogram(staleness: Mapping[int, int]) -> str:
    """Each staleness with its share of the groups."""
    whole = sum(staleness.values())
    return (
        ", ".join(f"{age}: {count / whole:.1%}" for age, count in sorted(staleness.items())) or "no steps were counted"
    )


def facts(trial: plan.Trial) -> dict[str, Any]:
    """Convert one trial to plain data."""
    o = trial.outcome
    return {
        "varied": dict(trial.varied), "workers": trial.num_workers, "trainer_gpus": trial.trainer_gpus,
        "step_s": o.step_s, "samples_per_s": o.samples_per_s, "tokens_per_s": o.tokens_per_s, "train_s": o.train_s,
        "trainer_wait_share": o.trainer_wait_share, "rollout_idle_share": o.rollout_idle_share,
        "rollout_paused_share": o.rollout_paused_share, "rollout_prefill_share": o.rollout_prefill_share,
        "mean_batch": o.mean_batch, "imbalance": o.imbalance, "staleness_mean": o.staleness_mean,
        "staleness": {str(key): count for key, count in sorted(o.staleness.items())},
        "losses": None if o.losses is None else asdict(o.losses),
        "steps": o.steps, "first_step": o.first_step, "simulated_s": o.total_s, "wall_s": trial.wall_s,
    }  # fmt: skip
