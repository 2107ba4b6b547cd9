"""Does the simulator predict? The paper's published runs, and runs of this machine.

    python -m benchmarks.simulator                 fit on four rows, predict the rest: some minutes
    python -m benchmarks.simulator --no-fit        predict with the shipped efficiencies
    python -m benchmarks.simulator --runs RUN ...  also: calibrate on each of these runs, predict the others
    python -m benchmarks.simulator --quick         two steps a row, no fit; writes nothing

Paper: arXiv 2505.24298, Table 1 (hours of synchronous and asynchronous AReaL, 512 prompts x 16 answers, 16 to 48
nodes of 8 H800) and Table 2 (throughput by staleness, 1.5B). Four numbers are fitted on the four synchronous rows of
Table 1 and on nothing else: the decode floor, the share of the bandwidth, the time of an all-reduce between the GPUs
of a worker (only the two larger models have any) and the overhead of a step; the trainer's share of FLOP/s is what
the paper reports. The asynchronous rows and Table 2 are predicted.

What the paper does not give is assumed, the same for all rows: answers log-normal with a coefficient of variation of
0.87 (measured on a thinking model), 65 % of the log variance between prompts, cut at 27,648 tokens, with a mean of
9,270: what Table 2's throughput (128.7 k tokens/s) and Table 1's hours make of the 1.5B row.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_like.emulation.lengths import Lengths
from areal_like.emulation.machines import GPUS, MODELS
from areal_like.emulation.roofline import Efficiencies, Roofline, smallest_tp
from benchmarks.runs import write
from controller.overrides import load_config
from controller.run_folder import RunFolder
from controller.simulate.calibrate import calibrate
from controller.simulate.lengths import parse_lengths
from controller.simulate.plan import Setup, simulate
from controller.simulate.world import Job, World

LENGTHS = Lengths("thinking model", mean=9270.0, cv=0.87, cap=27_648)
PROMPTS, ANSWERS, MINI_BATCHES = 512, 16, 4
ROLLOUT_SHARE = 0.75
SLOTS = 256
"""Sequences a worker decodes at most, everywhere."""
ETA = {"1.5b": 8, "7b": 8, "14b": 4, "32b": 4}
"""Staleness they trained with: 8 for math, 4 for code."""


@dataclass(frozen=True)
class Row:
    """One row of Table 1."""

    model: str
    gpus: int
    steps: int
    sync_h: float
    async_h: float


TABLE_1 = (
    Row("1.5b", 128, 250, 41.0, 14.8),
    Row("7b", 192, 250, 57.7, 25.4),
    Row("14b", 256, 80, 48.8, 21.9),
    Row("32b", 384, 60, 51.1, 31.1),
)
TABLE_2 = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, None: 396.8}
"""Thousand tokens a second by max_staleness, 1.5B on 128 GPUs."""
PARAMETERS = ("decode_floor_s", "bandwidth", "reduction_s", "step_overhead_s")
LOW = np.log([5e-4, 0.05, 1e-6, 1.0])
HIGH = np.log([5e-2, 1.0, 2e-3, 300.0])


def hours(row: Row, reached: Efficiencies, *, eta: int | None, steps: int) -> float:
    """Predicted hours of a row; eta 0: synchronous, each phase on all GPUs."""
    gpu, model = GPUS["h800"], MODELS[row.model]
    tp = smallest_tp(gpu, model)
    rollout = row.gpus if eta == 0 else round(row.gpus * ROLLOUT_SHARE)
    trainer = row.gpus if eta == 0 else row.gpus - rollout
    job = Job(
        PROMPTS, ANSWERS, steps, LENGTHS, mode="sync" if eta == 0 else "async", max_staleness=eta,
        updates_per_step=MINI_BATCHES,
    )  # fmt: skip
    costs = Roofline(gpu, model, tp, trainer, reached, slots=SLOTS)
    return World(job, costs, rollout // tp).run().step_s * row.steps / 3600


def fit(steps: int, tell: Callable[[str], None]) -> Efficiencies:
    """The four efficiencies whose synchronous rows are nearest in ratio (Nelder-Mead on their logarithms)."""

    def error(point: np.ndarray) -> float:
        clipped = np.clip(point, LOW, HIGH)
        reached = _reached(clipped)
        ratios = [math.log(hours(row, reached, eta=0, steps=steps) / row.sync_h) for row in TABLE_1]
        return float(np.square(ratios).mean() + np.square(point - clipped).sum())

    start = np.log([asdict(Efficiencies())[name] for name in PARAMETERS])
    found, value = nelder_mead(error, start, step=0.5, evaluations=120)
    tell(f"fitted: root mean square error of the synchronous rows {math.sqrt(value):.1%}")
    return _reached(np.clip(found, LOW, HIGH))


def _reached(point: np.ndarray) -> Efficiencies:
    return Efficiencies(
        **{name: float(f"{math.exp(value):.3g}") for name, value in zip(PARAMETERS, point, strict=True)}
    )


def nelder_mead(
    function: Callable[[np.ndarray], float], start: np.ndarray, *, step: float, evaluations: int
) -> tuple[np.ndarray, float]:
    """Minimum of a function without gradients (Nelder and Mead 1965)."""
    points = [start, *(start + step * unit for unit in np.eye(len(start)))]
    simplex = sorted(((function(point), point) for point in points), key=lambda pair: pair[0])
    count = len(simplex)
    while count < evaluations:
        centre = np.mean([point for _, point in simplex[:-1]], axis=0)
        worst_value, worst = simplex[-1]
        reflected = centre + (centre - worst)
        value = function(reflected)
        count += 1
        if value < simplex[0][0]:
            expanded = centre + 2 * (centre - worst)
            further = function(expanded)
            count += 1
            simplex[-1] = (further, expanded) if further < value else (value, reflected)
        elif value < simplex[-2][0]:
            simplex[-1] = (value, reflected)
        else:
            inner = centre + 0.5 * ((reflected if value < worst_value else worst) - centre)
            nearer = function(inner)
            count += 1
            if nearer < min(value, worst_value):
                simplex[-1] = (nearer, inner)
            else:
                best = simplex[0][1]
                simplex[1:] = [
                    (function(moved), moved) for _, point in simplex[1:] for moved in [best + 0.5 * (point - best)]
                ]
                count += len(simplex) - 1
        simplex.sort(key=lambda pair: pair[0])
    return simplex[0][1], simplex[0][0]


# ------------------------------------------------------------ tables


def paper(reached: Efficiencies, *, sync_steps: int, async_steps: int, etas: Sequence[int | None]) -> dict[str, Any]:
    """Predicted beside reported."""
    table_1 = []
    head = ("sync h", "reported", "async h", "reported", "ratio", "reported", "error")
    print("\nTable 1  " + " ".join(f"{name:>9}" for name in head))
    for row in TABLE_1:
        sync = hours(row, reached, eta=0, steps=sync_steps)
        asynchronous = hours(row, reached, eta=ETA[row.model], steps=async_steps)
        ratio, reported = sync / asynchronous, row.sync_h / row.async_h
        table_1.append(
            {**asdict(row), "predicted_sync_h": sync, "predicted_async_h": asynchronous, "predicted_ratio": ratio,
             "reported_ratio": reported, "ratio_error": ratio / reported - 1}
        )  # fmt: skip
        print(
            f"{row.model:8} {sync:9.1f} {row.sync_h:9.1f} {asynchronous:9.1f} {row.async_h:9.1f} {ratio:9.2f} "
            f"{reported:9.2f} {ratio / reported - 1:+9.0%}"
        )
    table_2 = []
    print(f"\n{'Table 2':12} {'k tokens/s':>11} {'reported':>9} {'to sync':>8} {'reported':>9} {'error':>7}")
    base = None
    for eta in etas:
        found = hours(TABLE_1[0], reached, eta=eta, steps=sync_steps if eta == 0 else async_steps)
        rate = PROMPTS * ANSWERS * LENGTHS.mean_length() / (found * 3600 / TABLE_1[0].steps) / 1e3
        base = base or rate
        reported = TABLE_2[eta] / TABLE_2[0]
        table_2.append({"eta": eta, "predicted_k_tokens_per_s": rate, "reported": TABLE_2[eta],
                        "predicted_to_sync": rate / base, "reported_to_sync": reported})  # fmt: skip
        print(
            f"eta {eta!s:8} {rate:11.1f} {TABLE_2[eta]:9.1f} {rate / base:8.2f} {reported:9.2f} "
            f"{rate / base / reported - 1:+7.0%}"
        )
    return {"table_1": table_1, "table_2": table_2}


def own_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Costs from each run, throughput of the others with them. Runs in `mode: sync` have other threads: left apart."""
    found = []
    print(f"\n{'calibrated on':24} {'predicted':24} {'samples/s':>10} {'measured':>9} {'error':>7}")
    for source in folders:
        for target in folders:
            source_config, target_config = (load_config(str(run)).config for run in (source, target))
            if (source_config.mode == "sync") != (target_config.mode == "sync"):
                continue
            run = RunFolder(source)
            measured, prompt = calibrate(run, slots=source_config.rollout.engine.num_slots)
            lengths = parse_lengths(str(source), target_config.sampling.max_new_tokens)
            setup = Setup(target_config, lengths, target_config.num_steps, measured=measured, prompt_tokens=prompt)
            predicted = simulate(setup).outcome.samples_per_s
            real = _measured_rate(target)
            found.append({"calibrated_on": source.name, "predicted_run": target.name, "mode": target_config.mode,
                          "is_unseen": source != target, "predicted": predicted, "measured": real})  # fmt: skip
            print(f"{source.name:24} {target.name:24} {predicted:10.1f} {real:9.1f} {predicted / real - 1:+7.1%}")
    return found


def _measured_rate(run: Path) -> float:
    """Samples a second of the run, without the first fifth of its steps, as the simulator counts."""
    from controller.report.data import RunData

    steps = RunData.load(RunFolder(run), max_samples=1).steps
    later = steps[max(1, len(steps) // 5) :]
    before = steps[max(1, len(steps) // 5) - 1]
    return float(sum(step["num_samples"] for step in later) / (later[-1]["wall_s"] - before["wall_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-fit", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", nargs="*", default=[], type=Path, metavar="RUN")
    options = parser.parse_args()
    is_fitted = not (options.no_fit or options.quick)
    reached = fit(2, print) if is_fitted else Efficiencies()
    print("efficiencies: " + ", ".join(f"{key} {value:g}" for key, value in asdict(reached).items()))
    if options.quick:
        paper(reached, sync_steps=2, async_steps=6, etas=(0, 1))
        print("too short to mean anything: it ran")
        return
    result = paper(reached, sync_steps=4, async_steps=40, etas=tuple(TABLE_2))
    result["runs"] = own_runs(options.runs)
    facts = {
        "efficiencies": asdict(reached),
        "is_fitted": is_fitted,
        "lengths": {"mean": 9270, "cv": 0.87, "cap": 27648},
    }
    command = " ".join(["python -m benchmarks.simulator", *sys.argv[1:]])
    print(f"written to {write('simulator', command, {**facts, **result})}")


if __name__ == "__main__":
    main()
