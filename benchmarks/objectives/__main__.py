"""Which loss, correction or advantage should one choose at a given staleness? All of them on identical data.

    python -m benchmarks.objectives gradients                cosine with the on-policy gradient, by lag
    python -m benchmarks.objectives curves                   accuracy where every sample is exactly k versions old
    python -m benchmarks.objectives curves --task long       the same on long answers
    python -m benchmarks.objectives quickstart --seeds 1     the quickstart with each objective's line of configuration
    python -m benchmarks.objectives quickstart --variants online_dpo     five seeds of one of them
    python -m benchmarks.objectives gradients --quick        a minute; writes nothing
    python -m benchmarks.objectives curves --variants all --lags 0,1,4,16,64       every variant: hours

`gradients` and `curves` have the trainer's own step and the embedded engine in one process, so that the lag is exact.
What they compare is in variants.py, each as a section of configuration; `quickstart` runs the jobs of quickstarts.py.
Each variant of `curves` has the same budget of tuning: four learning rates at lag TUNING_LAG, on a seed that does not
count; by default it compares the variants CURVES, and on long answers LONG_CURVES at lags 0 and 16. A result has a
part for each question and task, and for `quickstart` with `--variants`; a call measures one part.
`--go-on` takes the rows of an interrupted call.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import folders
from benchmarks.measured import INTEGERS, TEXTS, Measured, add_options
from benchmarks.objectives import quickstarts
from benchmarks.objectives.gradients import Extent
from benchmarks.objectives.jobs import Jobs, curve, gradients, pool_of
from benchmarks.objectives.task import SMALLEST, TASKS, Task
from benchmarks.objectives.variants import VARIANTS
from benchmarks.publishing import next_to_runs
from benchmarks.runs import command_of, parts_with, write
from benchmarks.spreads import mean_interval

QUESTION = "objectives"
LAGS = {"gradients": "0,1,4,16,64", "curves": "0,16,64", "quickstart": "0"}
LONG_LAGS = "0,16"
"""Of curves of the long task."""
SEEDS, RATES = "1,2,3,4,5", "5e-5,1e-4,2e-4,4e-4"
CURVES: tuple[str, ...] = ("decoupled", "ppo", "exact_weight", "m2po", "gspo", "cispo", "dppo", "vespo")
"""The variants whose ideas differ most: the default, no correction, a weight without limit, a mask by the second
moment, whole answers, clipped weights, the probability as trust region, and a weight of whole answers."""
LONG_CURVES: tuple[str, ...] = ("decoupled", "ppo", "gspo", "cispo", "dppo", "vespo")
TUNING_SEED, TUNING_LAG = 1000, 16
STEPS = {"short": 96, "long": 64}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("gradients", "curves", "quickstart"))
    parser.add_argument("--task", choices=tuple(TASKS), default="short")
    parser.add_argument("--lags", type=INTEGERS, help="default: " + "; ".join(f"{part}: {LAGS[part]}" for part in LAGS))
    parser.add_argument("--seeds", type=INTEGERS, default=SEEDS)
    parser.add_argument("--variants", help="of variants.py or quickstarts.py; `all`")
    parser.add_argument("--steps", type=int, help="steps of a curve")
    parser.add_argument("--tune", type=TEXTS, default=RATES, metavar="LR,LR", help="learning rates of every variant")
    parser.add_argument("--processes", type=int, default=2, help="jobs at once, one thread each")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    known = quickstarts.JOBS if options.part == "quickstart" else VARIANTS
    options.lags = options.lags or default_lags(options)
    curves: tuple[str, ...] = LONG_CURVES if options.task == "long" else CURVES
    usual = curves if options.part == "curves" else tuple(known)
    names = list({None: usual, "all": known}.get(options.variants) or options.variants.split(","))
    if unknown := set(names) - set(known):
        parser.error(f"no variant {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    measured = Measured.of(QUESTION, options)
    if options.part == "quickstart":
        names, seeds = (["cispo"], [1]) if options.quick else (names, options.seeds)
        result = quickstarts.measure(measured, names, seeds, options.runs_dir.resolve())
        publish(parser, options, ", ".join(["quickstart", *(names if options.variants else ())]), result, measured)
        return
    with pool_of(options.processes) as pool:
        jobs = Jobs(pool, measured, options.runs_dir.resolve(), is_quick=options.quick)
        if options.part == "gradients":
            result = measure_gradients(jobs, options, names)
        else:
            result = measure_curves(jobs, options, names)
    print_result(options.part, result)
    publish(parser, options, f"{options.part}, {options.task}", result, measured)


def default_lags(options: argparse.Namespace) -> list[int]:
    """The lags that are measured if `--lags` is not passed."""
    return INTEGERS(LONG_LAGS if (options.part, options.task) == ("curves", "long") else LAGS[options.part])


def publish(
    parser: argparse.ArgumentParser, options: argparse.Namespace, part: str, result: Row, measured: Measured
) -> None:
    """Write a part of the result: over the published one if it is complete, else with the runs.

    `gradients` and `curves` are complete with the default variants, lags, seeds, learning rates and steps. Some jobs of
    the quickstart are a part of their own, which is complete with all seeds.
    """
    if not options.quick:
        published = folders.RESULTS / f"{QUESTION}.json"
        keys = ("seeds", "variants", "steps", "tune", "lags")
        keys = ("seeds",) if part.startswith("quickstart, ") else ("variants",) if part == "quickstart" else keys
        defaults = parser.parse_args([options.part])
        defaults.lags = default_lags(options)
        is_default = all(getattr(options, key) == getattr(defaults, key) for key in keys)
        path = published if options.replace or is_default else next_to_runs(QUESTION, options)
        parts = parts_with(path, part, command_of(QUESTION), result)
        print(f"written to {write(QUESTION, command_of(QUESTION), {'parts': parts}, path)}")
    measured.finish()


def measure_gradients(jobs: Jobs, options: argparse.Namespace, names: Sequence[str]) -> Row:
    """Part `gradients`."""
    task = SMALLEST if options.quick else TASKS[options.task]
    seeds, lags = ([1], [0, 2]) if options.quick else (options.seeds, options.lags)
    extent = Extent((3,), 2, 2) if options.quick else Extent()
    keys = [["gradients", task, seed, lags, ",".join(names), extent] for seed in seeds]
    work = [partial(gradients, jobs.start(task, seed), task, seed, lags, names, extent) for seed in seeds]
    found = jobs.rows(keys, work)
    rows = [{"seed": seed, **row} for seed, one in zip(seeds, found, strict=True) for row in one["rows"]]
    summary = {
        name: {
            str(lag): {key: _interval(_by_seed(rows, name, lag, key)) for key in ("single", "mean", "norm")}
            for lag in lags
        }
        for name in names if any(row["variant"] == name for row in rows)
    }  # fmt: skip
    accuracy = {str(seed): one["accuracy"] for seed, one in zip(seeds, found, strict=True)}
    return {"task": task.name, "seeds": seeds, "lags": lags, "accuracy": accuracy, "summary": summary, "rows": rows}


def _by_seed(rows: Sequence[Row], name: str, lag: int, key: str) -> list[float]:
    """A value for each seed: the mean over its versions, which belong to one run."""
    values: dict[int, list[float]] = {}
    for row in rows:
        if (row["variant"], row["lag"]) == (name, lag):
            values.setdefault(row["seed"], []).append(row[key])
    return [sum(found) / len(found) for found in values.values()]


def measure_curves(jobs: Jobs, options: argparse.Namespace, names: Sequence[str]) -> Row:
    """Part `curves`: tuning first."""
    task = SMALLEST if options.quick else TASKS[options.task]
    seeds, lags, rates = ([1], [0, 2], ["1e-4"]) if options.quick else (options.seeds, options.lags, options.tune)
    steps = 4 if options.quick else options.steps or STEPS[task.name]
    tuned = {name: rates[0] for name in names}
    if len(rates) > 1:
        cases = [(name, TUNING_LAG, TUNING_SEED, rate) for name in names for rate in rates]
        reached = {(row["variant"], row["lr"]): row["accuracy"] for row in _curves(jobs, task, cases, steps)}
        tuned = {name: max(rates, key=lambda rate, name=name: (reached[name, rate], float(rate))) for name in names}
    cases = [(name, lag, seed, tuned[name]) for seed in seeds for lag in lags for name in names]
    rows = _curves(jobs, task, cases, steps)
    summary = {
        name: {
            str(lag): _interval([row["accuracy"] for row in rows if (row["variant"], row["lag"]) == (name, lag)])
            for lag in lags
        }
        for name in names
    }
    tried = {name: {rate: reached[name, rate] for rate in rates} for name in names} if len(rates) > 1 else {}
    return {"task": task.name, "steps": steps, "seeds": seeds, "lags": lags, "tuned": tuned, "tried": tried,
            "summary": summary, "rows": rows}  # fmt: skip


def _curves(jobs: Jobs, task: Task, cases: Sequence[tuple[str, int, int, str]], steps: int) -> list[Row]:
    keys = [["curves", task, *case, steps, VARIANTS[case[0]]] for case in cases]
    work = [
        partial(curve, jobs.start(task, seed), task, seed, lag, name, rate, steps) for name, lag, seed, rate in cases
    ]
    found = jobs.rows(keys, work)
    return [
        {"variant": name, "lag": lag, "seed": seed, "lr": rate, **row}
        for (name, lag, seed, rate), row in zip(cases, found, strict=True)
    ]


def _interval(values: Sequence[float]) -> list[float | None]:
    """Mean, and half width of its 95 % interval."""
    return list(mean_interval(values)) if values else [None, None]


def print_result(part: str, result: Row) -> None:
    """Means by variant and lag."""
    print(f"\n{part}, {result['task']}: {'mean cosine of single batches' if part == 'gradients' else 'accuracy'}")
    print(f"{'':20}" + "".join(f"{f'lag {lag}':>10}" for lag in result["lags"]))
    for name, by_lag in result["summary"].items():
        cells = (by_lag[str(lag)]["single"] if part == "gradients" else by_lag[str(lag)] for lag in result["lags"])
        print(f"{name:20}" + "".join(f"{'-' if cell[0] is None else format(cell[0], '.3f'):>10}" for cell in cells))


if __name__ == "__main__":
    main()
