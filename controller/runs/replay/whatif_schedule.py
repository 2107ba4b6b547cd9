"""`areal-like whatif RUN rollout.num_workers=...`: another schedule, simulated with the costs measured in the run.

The recorded schedule is simulated as well and compared with the measured steps, which shows the simulator's error.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from controller.config.loading import load_config
from controller.config.run_config import RunConfig
from controller.data.length_distribution import parse_lengths
from controller.report.data import RunData
from controller.run_folder.run_folder import RunFolder
from controller.simulate import plan
from controller.simulate.calibrate import FIRST_STEP, calibrate, other_threads
from controller.simulate.command import loss_words

MAX_STEPS = 100


def simulate_changed(folder: RunFolder, overrides: Sequence[str], *, as_json: bool) -> int:
    """Simulate the run's schedule and the changed one, and print both; return the exit status, 0.

    Raises UserError: the settings do not fit, or the run has too few measurements.
    """
    name = str(folder.root)
    recorded, changed = load_config(name).config, load_config(name, overrides).config
    trials = [plan.simulate(_setup(folder, config)) for config in (recorded, changed)]
    measured_s = _measured_step_s(folder)
    threads = other_threads(recorded, changed)
    if as_json:
        found = [_facts(trial) for trial in trials]
        facts = {"run": folder.name, "settings": list(overrides), "measured_step_s": measured_s, "threads": threads}
        print(json.dumps({**facts, "recorded": found[0], "changed": found[1]}, indent=1))
        return 0
    _print(trials, measured_s, " ".join(overrides))
    if threads is not None:
        print(f"note: {threads}", file=sys.stderr)
    return 0


def _setup(folder: RunFolder, config: RunConfig) -> plan.Setup:
    costs, prompt_tokens = calibrate(folder, slots=config.rollout.engine.num_slots)
    return plan.Setup(
        config=config,
        lengths=parse_lengths(str(folder.root), config.sampling.max_new_tokens),
        num_steps=min(config.num_steps, MAX_STEPS),
        measured=costs,
        prompt_tokens=prompt_tokens,
    )


def _measured_step_s(folder: RunFolder) -> float | None:
    """Median seconds from step to step of the run; None: it has too few."""
    times = [row["wall_s"] for row in RunData.load(folder, max_samples=1).steps if row["step"] >= FIRST_STEP]
    steps_s = [after - before for before, after in itertools.pairwise(times) if after > before]
    return statistics.median(steps_s) if steps_s else None


def _facts(trial: plan.Trial) -> dict[str, Any]:
    o = trial.outcome
    return {
        "step_s": o.step_s, "samples_per_s": o.samples_per_s, "trainer_wait_share": o.trainer_wait_share,
        "rollout_idle_share": o.rollout_idle_share, "staleness_mean": o.staleness_mean,
        "token_share_dropped": 0.0 if o.losses is None else o.losses.token_share,
    }  # fmt: skip


def _print(trials: Sequence[plan.Trial], measured_s: float | None, words: str) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("schedule", "step s", "samples/s", "trainer waits", "rollout idle", "staleness"):
        table.add_column(head, justify="left" if head == "schedule" else "right", overflow="fold")
    for name, trial in zip(("recorded", words), trials, strict=True):
        o = trial.outcome
        table.add_row(
            name, f"{o.step_s:.3g}", f"{o.samples_per_s:,.3g}", f"{o.trainer_wait_share:.1%}",
            f"{o.rollout_idle_share:.1%}", f"{o.staleness_mean:.2f}",
        )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    before_s, after_s = (trial.outcome.step_s for trial in trials)
    print(
        f"simulated with the costs of the run: a step takes {after_s / before_s:.2f} times as long as without the "
        "change"
    )
    if measured_s is not None:
        print(
            f"the steps of the run took {measured_s:.3g} s (median); the simulation of the unchanged schedule differs "
            f"by {before_s / measured_s - 1:+.0%}"
        )
    for trial in trials:
        if trial.outcome.losses is not None:
            print(f"on_stale: {trial.setup.config.staleness.on_stale}: {loss_words(trial.outcome.losses)}")
