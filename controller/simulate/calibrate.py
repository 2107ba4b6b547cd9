"""Costs of a machine, fitted linearly to the counters of a run on it.

Files are read in report/data.py.

Between two pulses a worker was busy for  a x decode steps + b x tokens + c x prefilled tokens;  a step of the trainer
took  d + e x tokens.  Least squares without negative coefficients; d is 0 if batch sizes are too similar to determine
it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_like.device_names import names_cpu
from areal_like.emulation.roofline import Measured
from areal_like.errors import UserError
from controller.config.run_config import RunConfig
from controller.report.data import RunData
from controller.run_folder.run_folder import RunFolder
from controller.wiring.process_specs import Role, threads_for

FEWEST_PULSES = 5
FEWEST_STEPS = 5
NEEDED = {"tokens", "step_s", "num_sampled_tokens", "num_samples"}
WORK = ("steps", "tokens", "prefill_tokens")
BORROWED = "shared_prefill_tokens"
"""Prompt tokens that were reused from another answer of the group. Simulated engines compute every prompt, so the cost
per prefilled token is averaged over both kinds.
"""
SPREAD = 2.0
"""Minimum ratio of the highest to the lowest tenth of batches' tokens for determining a step's fixed cost; single
outliers are ignored. With more similar batches the intercept of a line is not determined: fitted to nine runs of 5,000
tokens a step, it predicted steps of a quarter of the tokens 97 % too long on average, and a line through 0 17 % too
short.
"""
TENTHS = 11
"""Minimum steps: a single step is then less than a tenth."""
FIRST_STEP = 2
"""Earlier steps include startup costs."""


def calibrate(folder: RunFolder, *, slots: int) -> tuple[Measured, int]:
    """Fit the costs of a run; return also its mean prompt in tokens. Raises UserError if the run is too short."""
    data = RunData.load(folder, max_samples=1)
    work, busy_s = _rollout(data)
    if len(busy_s) < FEWEST_PULSES:
        raise _too_short(folder, f"the run has only {len(busy_s)} measurements of its rollout workers")
    per_step, per_token, per_prefill = _fit(work, busy_s)
    steps = [step for step in data.steps if step["step"] > FIRST_STEP and step.keys() >= NEEDED]
    if len(steps) < FEWEST_STEPS:
        raise _too_short(folder, f"the run has only {len(data.steps)} steps")
    fixed_s, per_trained = _training(steps)
    swaps = [swap for swap in data.swaps if swap.get("version", 0) > 0]
    measured = Measured(
        decode_step_s=per_step, decode_sequence_s=per_token, prefill_token_s=per_prefill,
        pause_s=_median(swap["pause_s"] for swap in swaps), staging_s=_median(swap["stage_s"] for swap in swaps),
        train_token_s=per_trained, train_step_s=fixed_s, slots=slots,
    )  # fmt: skip
    return measured, max(1, round(statistics.fmean(map(_prompt, steps))))


def other_threads(measured: RunConfig, planned: RunConfig) -> str | None:
    """Why costs of one job on this machine differ from those of another, as text about threads; None if they may be
    equal.
    """
    on_cores: list[Role] = []  # on a GPU the threads do hardly any of the work
    if names_cpu(planned.rollout.engine.device):
        on_cores.append("rollout")
    if names_cpu(planned.trainer.device):
        on_cores.append("trainer")
    had, has = ([threads_for(config, role) for role in on_cores] for config in (measured, planned))
    if had == has:
        return None
    whose = " and ".join({"rollout": "engine"}.get(role, role) for role in on_cores)
    return (
        f"in this run the {whose} had {_and(had)} threads, but with `mode: {planned.mode}` the number is {_and(has)}, "
        "so "
        "the costs of this job will be different"
    )


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _rollout(data: RunData) -> tuple[np.ndarray, np.ndarray]:
    """(steps, tokens, prefilled tokens) of every worker between two pulses, and the seconds it was busy."""
    rows: list[list[float]] = []
    busy: list[float] = []
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for pulse in data.pulses:
        for name, process in pulse["processes"].items():
            counters = process["counters"]
            if process["role"] != "rollout" or not counters.keys() >= {*WORK, "busy_s"}:
                continue
            key = name, process["incarnation"]
            if (before := last.get(key)) is not None and counters["busy_s"] > before["busy_s"]:
                grown = {key: counters[key] - before.get(key, 0.0) for key in counters}
                rows.append([grown["steps"], grown["tokens"], grown["prefill_tokens"] + grown.get(BORROWED, 0.0)])
                busy.append(counters["busy_s"] - before["busy_s"])
            last[key] = counters
    return np.asarray(rows).reshape(-1, 3), np.asarray(busy)


def _training(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Fixed seconds of a trainer's step, and seconds per token."""
    tokens, seconds = (np.asarray([step[key] for step in steps], np.float64) for key in ("tokens", "step_s"))
    low, high = np.quantile(tokens, [0.1, 0.9])
    if len(tokens) < TENTHS or high < SPREAD * low:
        return 0.0, float(tokens @ seconds / (tokens @ tokens))
    fixed_s, per_token = _fit(np.stack([np.ones_like(tokens), tokens], 1), seconds)
    return fixed_s, per_token


def _fit(inputs: np.ndarray, outputs: np.ndarray) -> tuple[float, ...]:
    """Least squares without negative coefficients: the best of all subsets of columns, the others 0."""
    best, best_error = np.zeros(inputs.shape[1]), float((outputs**2).sum())
    for count in range(1, inputs.shape[1] + 1):
        for columns in itertools.combinations(range(inputs.shape[1]), count):
            found, *_ = np.linalg.lstsq(inputs[:, columns], outputs, rcond=None)
            error = float(((inputs[:, columns] @ found - outputs) ** 2).sum())
            if (found >= 0).all() and error < best_error:
                best_error, best = error, np.zeros(inputs.shape[1])
                best[list(columns)] = found
    return tuple(float(value) for value in best)


def _prompt(step: Mapping[str, Any]) -> float:
    return float((step["tokens"] - step["num_sampled_tokens"]) / max(1, step["num_samples"]))


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _too_short(folder: RunFolder, why: str) -> UserError:
    return UserError(
        f"there are too few measurements for a calibration: {why}",
        where=str(folder.root),
        remedy="use a run of at least 20 steps",
    )
