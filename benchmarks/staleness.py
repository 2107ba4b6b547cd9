"""What are cost and gain of staleness, and does the decoupled loss help? The quickstart at several bounds.

    python -m benchmarks.staleness                              7 bounds x 4 losses x 5 seeds: two hours
    python -m benchmarks.staleness --losses decoupled,naive                           half of it
    python -m benchmarks.staleness --quick                      2 bounds, 1 seed, 10 steps; writes nothing
    python -m benchmarks.staleness mine.yaml --bounds 0,4,unbounded --seeds 1,2,3 --tune 1e-6,2e-6
                                                                your own job, decoupled and naive, both tuned
    python -m benchmarks.staleness mine.yaml --sweep staleness.max_staleness=0,2,8 --seeds 1,2
                                                                one key of your own config

Results for your own job (CONFIG or overrides), and those of --sweep, are written next to its runs (--runs-dir), not
over the published result. Without CONFIG: the quickstart with sums of at most six terms and half of its groups per
step, and 30 steps, so that a run takes half a minute. These are few steps for the task, so that the cost of staleness
is visible. Everything except the bound and the loss is the same, four mini-batches per step included (with one, a step
has no trust region in which the losses could differ). `decoupled`: proximal log-probs recomputed, weights truncated at
5, the shipped default; `exact` and `mask` are its other weight modes. `naive`: ordinary PPO against the behaviour
policy. Every loss has the same tuning budget: the learning rate with the best accuracy at the last but one bound, on a
seed that is not counted, is used. Runs of a seed follow each other, bound by bound, with the losses in turn, from the
same warm start; at bound 0 the losses are equal up to rounding, so differences there are noise. Bound 0 is synchronous
here with one core per process; `mode: sync` would give all cores to the running phase, see benchmarks/modes.py.
Accuracy is greedy, on held-out prompts, of the last version.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.measured import (
    BOUNDS,
    INTEGERS,
    TEXTS,
    Measured,
    add_job,
    add_options,
    parse_job,
)
from benchmarks.publishing import next_to_runs, result_path
from benchmarks.runs import command_of, train, write
from benchmarks.spreads import mean_interval, spread_of
from benchmarks.sweep import KEYS, print_sweep, summarise, sweep
from benchmarks.tables.form import ranged
from benchmarks.warning import warning_of
from controller.report.data import RunData
from controller.run_folder.run_folder import RunFolder

LOSSES: dict[str, tuple[str, ...]] = {
    "decoupled": ("trainer.loss.proximal=recompute",),
    "exact": ("trainer.loss.proximal=recompute", "trainer.loss.weight.mode=exact"),
    "mask": ("trainer.loss.proximal=recompute", "trainer.loss.weight.mode=mask", "trainer.loss.weight.low=0.2"),
    "naive": ("trainer.loss.proximal=behaviour", "trainer.loss.weight.mode=off"),
}
SMALL = (
    "data.train.options.max_terms=6", "data.eval.options.max_terms=6", "sampling.max_new_tokens=48",
    "groups_per_step=24", "num_steps=30", "trainer.optimizer.schedule=constant",
)  # fmt: skip
"""Overrides of the quickstart for this benchmark."""
ALL_BOUNDS, RATES = "0,1,2,4,8,16,unbounded", "5e-5,1e-4,2e-4"
OWN_LOSSES = ("decoupled", "naive")
TUNING_SEED = 1000
MINI_BATCHES = 4
MONITORS = ("ess", "clip_fraction", "weight_truncated_share", "kl_behaviour_proximal", "kl_proximal_current",
            "entropy")  # fmt: skip
"""Step metrics whose mean is stored: those that a user would watch."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_job(parser)
    parser.add_argument(
        "--bounds", type=BOUNDS, default=ALL_BOUNDS, help="values of staleness.max_staleness; may include `unbounded`"
    )
    parser.add_argument("--seeds", type=INTEGERS, default="1,2,3,4,5")
    parser.add_argument("--losses", help=f"from {', '.join(LOSSES)} (default: all, with CONFIG: decoupled,naive)")
    parser.add_argument(
        "--tune", type=TEXTS, metavar="LR,LR", help=f"learning rates to try (default: {RATES}, with CONFIG: none)"
    )
    parser.add_argument("--sweep", default="", metavar="KEY=A,B", help="instead, vary one key of your config")
    parser.add_argument("--quick", action="store_true")
    add_options(parser)
    options = parse_job(parser)
    config = options.config or "configs/quickstart.yaml"
    bounds = ["0", "4"] if options.quick else options.bounds
    seeds = [1] if options.quick else options.seeds
    extra = [*([] if options.config else SMALL), *(["num_steps=10", "data.eval.limit=200"] if options.quick else [])]
    measured = Measured.of("staleness", options)
    if options.sweep:
        more = [*extra, *options.overrides]
        rows = sweep(config, options.sweep, seeds, more, options.runs_dir, measured)
        lines = summarise(rows)
        print_sweep(lines)
        if not options.quick:
            path = next_to_runs("sweep", options)  # none is published
            print(f"written to {write('sweep', command_of('staleness'), {'rows': rows, 'lines': lines}, path)}")
        measured.finish()
        return
    losses = options.losses.split(",") if options.losses else list(OWN_LOSSES if options.config else LOSSES)
    if unknown := set(losses) - set(LOSSES):
        raise SystemExit(f"no loss {', '.join(sorted(unknown))}; known: {', '.join(LOSSES)}")
    overrides = [f"trainer.mini_batches={MINI_BATCHES}", "eval.every_steps=0", *extra, *options.overrides]
    rates = rates_of(options)
    jobs = Jobs(config, overrides, options.runs_dir, measured)
    tuned = {loss: jobs.tune(loss, rates, bounds) for loss in losses}
    rows = jobs.measure(bounds, seeds, tuned)
    result = {"mini_batches": MINI_BATCHES, "bounds": bounds, "seeds": seeds, "losses": losses, "tuned": tuned,
              "tried": jobs.tried, "rows": rows, **compare(rows, bounds)}  # fmt: skip
    print_table(result)
    if not options.quick:
        print(f"written to {write('staleness', command_of('staleness'), result, result_path('staleness', options))}")
    measured.finish()


def rates_of(options: argparse.Namespace) -> list[str]:
    """Learning rates to try; empty if the command gives one."""
    given = [word for word in options.overrides if word.startswith("trainer.optimizer.lr=")]
    if given and options.tune:
        raise SystemExit(f"--tune and {given[0]}: the learning rate is either tuned or given")
    is_own = bool(options.config or given or options.quick)
    return RATES.split(",") if options.tune is None and not is_own else options.tune or []


class Jobs:
    """Runs jobs of one config, one after another."""

    def __init__(self, config: str, overrides: Sequence[str], runs_dir: Path, measured: Measured) -> None:
        self._config, self._overrides, self._runs_dir, self._measured = config, overrides, runs_dir, measured
        self.tried: dict[str, dict[str, float]] = {}
        """Accuracy by loss and learning rate."""

    def tune(self, loss: str, rates: Sequence[str], bounds: Sequence[str]) -> list[str]:
        """Overrides of the best learning rate for a loss (of equal ones the highest); empty without tuning. One run per
        learning rate, the same for all losses.
        """
        if not rates:
            return []
        bound = bounds[max(0, len(bounds) - 2)]
        found = self.tried[loss] = {}
        for rate in rates:
            row = self._run(TUNING_SEED, bound, loss, [f"trainer.optimizer.lr={rate}"])
            found[rate] = row["accuracy_after"]
            print(f"tuning {loss}: lr {rate}, max_staleness {bound}: accuracy {found[rate]:.3f}", flush=True)
        return [f"trainer.optimizer.lr={max(found, key=lambda rate: (found[rate], float(rate)))}"]

    def measure(self, bounds: Sequence[str], seeds: Sequence[int], tuned: Mapping[str, Sequence[str]]) -> list[Row]:
        """Run everything that is compared. tuned: additional overrides by loss."""
        rows: list[Row] = []
        shown = ("accuracy_after", "samples_per_s", "staleness_mean", "staleness_max", "ess", "audit")
        for seed in seeds:
            for bound in bounds:
                for loss, own in tuned.items():
                    rows.append(self._run(seed, bound, loss, own))
                    shown_values = "".join(f"  {key} {_short(rows[-1][key])}" for key in shown)
                    print(f"seed {seed}  max_staleness {bound}  {loss:10}{shown_values}", flush=True)
        return rows

    def _run(self, seed: int, bound: str, loss: str, own: Sequence[str]) -> Row:
        settings = [f"seed={seed}", *limit(bound), *LOSSES[loss], *self._overrides, *own]

        def measure() -> Row:
            summary = train(self._config, settings, self._runs_dir)
            accuracy(summary)
            row = {"seed": seed, "max_staleness": bound, "loss": loss, **{key: summary[key] for key in KEYS}}
            data = RunData.load(RunFolder(Path(summary["folder"])), max_samples=1)
            return row | monitors(data) | {"warned": warning_of(data)[0]}

        return self._measured.row([self._config, *settings], measure)


def limit(bound: str) -> list[str]:
    """Overrides of a bound."""
    return [f"staleness.max_staleness={bound}", *(["staleness.on_stale=keep"] if bound == "unbounded" else [])]


def accuracy(summary: Row) -> float:
    """Accuracy of the last version. Raises SystemExit if nothing was evaluated."""
    if summary["accuracy_after"] is None:
        raise SystemExit("this config has no evaluations; add data.eval")
    return float(summary["accuracy_after"])


def monitors(data: RunData) -> dict[str, float | None]:
    """Means of the watched metrics over the steps of a run."""
    found = {name: [step[name] for step in data.steps if name in step] for name in MONITORS}
    return {name: statistics.fmean(values) if values else None for name, values in found.items()}


def compare(rows: Sequence[Row], bounds: Sequence[str]) -> dict[str, Any]:
    """For each loss and bound: mean, lowest and highest over seeds. Losses, and bounds with the first one, are compared
    by seed."""
    by_place = {(row["loss"], row["max_staleness"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    losses = list(dict.fromkeys(row["loss"] for row in rows))

    def of(loss: str, bound: str, key: str) -> list[float]:
        return [by_place[loss, bound, seed][key] for seed in seeds]

    points = {
        loss: {
            bound: {
                key: spread_of(of(loss, bound, key))
                for key in ("accuracy_after", "samples_per_s", "staleness_mean", "ess")
            }
            for bound in bounds
        }
        for loss in losses
    }
    first = bounds[0]
    return {
        "points": points,
        "minus_naive": {
            loss: {
                bound: _paired(_minus(of(loss, bound, "accuracy_after"), of("naive", bound, "accuracy_after")))
                for bound in bounds
            }
            for loss in losses
            if "naive" in losses and loss != "naive"
        },
        "throughput_against_first_bound": {
            loss: {
                bound: _paired(_over(of(loss, bound, "samples_per_s"), of(loss, first, "samples_per_s")))
                for bound in bounds
            }
            for loss in losses
        },
    }


def _paired(values: Sequence[float]) -> dict[str, Any]:
    """Mean with the half width of its 95 % interval; null with only one pair."""
    mean, half = mean_interval(values)
    return {"mean": mean, "half_width_95": half, "pairs": list(values)}


def _minus(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _over(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(left, right, strict=True)]


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_table(result: dict[str, Any]) -> None:
    """Print the comparison: means over seeds, with the lowest and the highest in brackets."""
    print(f"\n{'max_staleness':14}{'loss':12}{'accuracy':>24}{'samples/s':>26}{'staleness':>12}")
    for bound in result["bounds"]:
        for loss in result["points"]:
            point = result["points"][loss][bound]
            accuracy, rate = ranged(point["accuracy_after"], 3, "mean"), ranged(point["samples_per_s"], 1, "mean")
            print(f"{bound:14}{loss:12}{accuracy:>24}{rate:>26}{point['staleness_mean']['mean']:12.2f}")
    for loss, by_bound in result["minus_naive"].items():
        for bound, paired in by_bound.items():
            half = "" if paired["half_width_95"] is None else f" ± {paired['half_width_95']:.3f} (95 % interval)"
            print(f"max_staleness {bound}: accuracy of {loss} minus naive {paired['mean']:+.3f}{half}, "
                  f"paired by seed: {', '.join(f'{value:+.3f}' for value in paired['pairs'])}")  # fmt: skip


def plot(source: Path, picture: Path) -> Path:
    """Draw a result file: accuracy and throughput over the bound, with a dot per seed and a line through the means."""
    result = json.loads(source.read_text())
    bounds = result["bounds"]
    made, (accuracy, speed) = pictures.figure(2)
    losses = list(result["points"])
    for index, loss in enumerate(losses):
        colour, marker = pictures.SERIES[index], pictures.MARKERS[index]
        shift = (index - (len(losses) - 1) / 2) * 0.14  # side by side, so that equal values stay visible
        for panel, key in ((accuracy, "accuracy_after"), (speed, "samples_per_s")):
            places = [position + shift for position in range(len(bounds))]
            means = [result["points"][loss][bound][key]["mean"] for bound in bounds]
            panel.plot(places, means, color=colour, linewidth=1.6, marker=marker, markersize=6, label=loss)
            dots = [row for row in result["rows"] if row["loss"] == loss]
            panel.scatter([bounds.index(row["max_staleness"]) + shift for row in dots], [row[key] for row in dots],
                          color=colour, marker=marker, s=12, alpha=0.55)  # fmt: skip
    accuracy.set_title("Final accuracy (held-out, greedy)")
    accuracy.legend(loc="best")
    speed.set_title("Throughput (consumed samples/s)")
    speed.set_ylim(bottom=0)
    for panel in (accuracy, speed):
        panel.set_xticks(range(len(bounds)), bounds)
        panel.set_xlabel("staleness.max_staleness")
    described = "; ".join(
        f"{loss}, bound {bound}: accuracy {point['accuracy_after']['mean']:.3f}, "
        f"{point['samples_per_s']['mean']:.0f} samples/s"
        for loss in losses
        for bound, point in result["points"][loss].items()
    )
    title = f"Accuracy and throughput against max_staleness, seeds {', '.join(map(str, result['seeds']))}"
    return pictures.save(made, picture, title=title, description=described, source=source)


if __name__ == "__main__":
    main()
