"""What does staleness cost, what does it buy, and does the decoupled loss help? The quickstart at several bounds.

    python -m benchmarks.staleness                              5 bounds x 2 losses x 2 seeds: 20 runs, over an hour
    python -m benchmarks.staleness --quick                      2 bounds, 1 seed, 10 steps; writes nothing
    python -m benchmarks.staleness --bounds 0,4,unbounded --seeds 1,2,3 trainer.optimizer.lr=2e-4
    python -m benchmarks.staleness --plot-only                  draw docs/pictures/staleness.svg again from the JSON

Everything but the bound and the loss is the same, four mini-batches a step included (with one, a step has no trust
region that the two losses could differ in). `decoupled`: proximal log-probs recomputed, weights truncated at 5, the
shipped default. `naive`: ordinary PPO against the behaviour policy. Runs of a seed follow each other, bound by bound,
the two losses in turn, from the same warm start; at bound 0 the two losses are the same up to rounding, so what
differs there is noise. Bound 0 is synchronous here with one core per process; `mode: sync` would give all cores to
whichever phase runs, see benchmarks/modes.py. Accuracy is greedy, on held-out prompts, of the last version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.runs import REPOSITORY, RESULTS, mean_interval, train, write

LOSSES: dict[str, tuple[str, ...]] = {
    "decoupled": ("trainer.loss.proximal=recompute",),
    "naive": ("trainer.loss.proximal=behaviour", "trainer.loss.weight.mode=off"),
}
MINI_BATCHES = 4
KEYS = ("accuracy_before", "accuracy_after", "samples_per_s", "tokens_per_s", "train_wall_s", "trainer_wait_share",
        "rollout_idle_share", "staleness_mean", "staleness_max", "steps", "groups_dropped", "audit")  # fmt: skip
MONITORS = ("ess", "clip_fraction", "weight_truncated_share", "kl_behaviour_proximal", "entropy")
"""Metrics of the steps whose mean is kept: what a user would watch."""
RESULT = RESULTS / "staleness.json"
PICTURE = REPOSITORY / "docs" / "pictures" / "staleness.svg"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--bounds", default="0,1,2,4,8", help="values of staleness.max_staleness; `unbounded` is one")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_intermixed_args()
    if options.plot_only:
        print(f"written to {plot(RESULT, PICTURE)}")
        return
    bounds = ["0", "4"] if options.quick else options.bounds.split(",")
    seeds = [1] if options.quick else [int(seed) for seed in options.seeds.split(",")]
    extra = ["num_steps=10", "data.eval.limit=200"] if options.quick else []
    overrides = [f"trainer.mini_batches={MINI_BATCHES}", "eval.every_steps=0", *extra, *options.overrides]
    rows = measure(options.config, bounds, seeds, overrides, options.runs_dir)
    result = {"mini_batches": MINI_BATCHES, "bounds": bounds, "seeds": seeds, "rows": rows, **compare(rows, bounds)}
    print_table(result)
    if not options.quick:
        path = write("staleness", " ".join(["python -m benchmarks.staleness", *sys.argv[1:]]), result)
        print(f"written to {path} and {plot(path, PICTURE)}")


def measure(
    config: str, bounds: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], runs_dir: Path
) -> list[Row]:
    """Run everything, one run after the other."""
    rows: list[Row] = []
    for seed in seeds:
        for bound in bounds:
            for loss, settings in LOSSES.items():
                limit = [f"staleness.max_staleness={bound}"]
                limit += ["staleness.on_stale=keep"] if bound == "unbounded" else []
                summary = train(config, [f"seed={seed}", *limit, *settings, *overrides], runs_dir)
                if summary["accuracy_after"] is None:
                    raise SystemExit("this config evaluates nothing; give it data.eval")
                row = {"seed": seed, "max_staleness": bound, "loss": loss, **{key: summary[key] for key in KEYS}}
                rows.append(row | monitors(Path(summary["folder"]) / "metrics.jsonl"))
                shown = ("accuracy_after", "samples_per_s", "staleness_mean", "staleness_max", "ess", "audit")
                print(f"seed {seed}  max_staleness {bound}  {loss:10}" +
                      "".join(f"  {key} {_short(rows[-1][key])}" for key in shown), flush=True)  # fmt: skip
    return rows


def monitors(metrics: Path) -> dict[str, float | None]:
    """Means over the steps of a run."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if record.get("kind") == "step"]
    found = {name: [step[name] for step in steps if name in step] for name in MONITORS}
    return {name: statistics.fmean(values) if values else None for name, values in found.items()}


def compare(rows: Sequence[Row], bounds: Sequence[str]) -> dict[str, Any]:
    """Per loss and bound: mean, lowest and highest over seeds. Between losses, and against the first bound: by seed."""
    by_place = {(row["loss"], row["max_staleness"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})

    def of(loss: str, bound: str, key: str) -> list[float]:
        return [by_place[loss, bound, seed][key] for seed in seeds]

    points = {
        loss: {
            bound: {
                key: _spread(of(loss, bound, key))
                for key in ("accuracy_after", "samples_per_s", "staleness_mean", "ess")
            }
            for bound in bounds
        }
        for loss in LOSSES
    }
    first = bounds[0]
    return {
        "points": points,
        "decoupled_minus_naive": {
            bound: _paired(_minus(of("decoupled", bound, "accuracy_after"), of("naive", bound, "accuracy_after")))
            for bound in bounds
        },
        "throughput_against_first_bound": {
            loss: {
                bound: _paired(_over(of(loss, bound, "samples_per_s"), of(loss, first, "samples_per_s")))
                for bound in bounds
            }
            for loss in LOSSES
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}


def _paired(values: Sequence[float]) -> dict[str, Any]:
    """Mean with the half width of its 95 % interval; null where one pair gives none."""
    mean, half = mean_interval(values)
    return {"mean": mean, "half_width_95": half if len(values) > 1 else None, "pairs": list(values)}


def _minus(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _over(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(left, right, strict=True)]


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_table(result: dict[str, Any]) -> None:
    """The comparison, as text: means over seeds, lowest and highest in brackets."""
    print(f"\n{'max_staleness':14}{'loss':12}{'accuracy':>24}{'samples/s':>26}{'staleness':>12}")
    for bound in result["bounds"]:
        for loss in LOSSES:
            point = result["points"][loss][bound]
            print(f"{bound:14}{loss:12}{_cell(point['accuracy_after'], 3):>24}{_cell(point['samples_per_s'], 1):>26}"
                  f"{point['staleness_mean']['mean']:12.2f}")  # fmt: skip
    for bound, paired in result["decoupled_minus_naive"].items():
        half = "" if paired["half_width_95"] is None else f" ± {paired['half_width_95']:.3f} (95 % interval)"
        print(f"max_staleness {bound}: accuracy of decoupled minus naive {paired['mean']:+.3f}{half}, "
              f"paired by seed: {', '.join(f'{value:+.3f}' for value in paired['pairs'])}")  # fmt: skip


def _cell(spread: dict[str, float], digits: int) -> str:
    return f"{spread['mean']:.{digits}f} ({spread['low']:.{digits}f} to {spread['high']:.{digits}f})"


def plot(source: Path, picture: Path) -> Path:
    """Draw a result file: accuracy and throughput against the bound; a dot per seed, a line through the means."""
    if not source.is_file():
        raise SystemExit(f"{source} is not there; measure first: python -m benchmarks.staleness")
    result = json.loads(source.read_text())
    bounds = result["bounds"]
    made, (accuracy, speed) = pictures.figure(2)
    for index, loss in enumerate(LOSSES):
        colour, marker = pictures.SERIES[index], pictures.MARKERS[index]
        shift = (index - (len(LOSSES) - 1) / 2) * 0.14  # side by side, so that equal values stay visible
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
        for loss in LOSSES
        for bound, point in result["points"][loss].items()
    )
    title = f"Accuracy and throughput against max_staleness, seeds {', '.join(map(str, result['seeds']))}"
    return pictures.save(made, picture, title=title, description=described, source=source)


if __name__ == "__main__":
    main()
